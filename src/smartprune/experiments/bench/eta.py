"""The time that a benchmark still takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ...training.progress import format_duration


class Eta:
    """Announces the steps of a benchmark with the time left. Every step is expected to take as long as the last one of its kind.

    ``steps`` says how many steps of each kind there are. ``expected`` holds seconds of kinds before the first step of that kind;
    while a remaining kind has none, the time left does not include it.
    """

    def __init__(
        self, announce: Callable[[str], None], steps: Mapping[str, int], expected: Mapping[str, float] | None = None
    ) -> None:
        self.announce, self.left, self.seconds = announce, dict(steps), dict(expected or {})

    @contextmanager
    def step(self, kind: str, message: str) -> Iterator[None]:
        """A step of a benchmark. Its start is announced."""
        if kind in self.seconds:
            left = sum(count * self.seconds.get(name, 0.0) for name, count in self.left.items())
            message += f", about {format_duration(left)} left"
        self.announce(message)
        start = time.monotonic()
        yield
        self.seconds[kind] = time.monotonic() - start
        self.left[kind] -= 1
