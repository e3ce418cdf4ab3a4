"""Progress of a sweep: a live block on a terminal, a line per finished run elsewhere."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TextIO

from ...text import shorten
from ...training.progress import Screen, clock

LIVE_SECONDS = 0.5  # between pictures
NAME = 40  # columns for the name of a run


@dataclass(frozen=True)
class Line:
    """A run under way, with the last thing it told."""

    name: str
    told: str
    seconds: float


@dataclass(frozen=True)
class State:
    done: int
    total: int
    failed: int
    left: float | None  # seconds
    running: list[Line]


class Board:
    """Shows the state of a sweep. Once it cannot be written to, it is silent."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.screen = Screen(stream)
        self.live = self.screen.stream.isatty() if live is None else live
        self._height = 0
        self._shown = 0.0

    def show(self, state: State) -> None:
        now = time.monotonic()
        if not self.live or now - self._shown < LIVE_SECONDS:
            return
        self._shown = now
        columns = shutil.get_terminal_size((100, 20)).columns - 1
        head = f"sweep  {state.done}/{state.total} done, {len(state.running)} running"
        head += f", {state.failed} failed" if state.failed else ""
        head += f", about {clock(state.left)} left" if state.left is not None else ""
        width = min(NAME, max((len(line.name) for line in state.running), default=0), columns // 2)
        lines = [head] + [
            f"  {shorten(line.name, width):<{width}}  {clock(line.seconds):>5}  {line.told}" for line in state.running
        ]
        self._write("".join(f"{line[:columns]}\n" for line in lines))
        self._height = len(lines)

    def ended(self, text: str) -> None:
        """A run has ended: a line that stays."""
        self.say(text)

    def say(self, text: str) -> None:
        self._write(f"{text}\n")

    def close(self) -> None:
        """Takes the live block away."""
        self._write("")

    def _write(self, text: str) -> None:
        """Writes in the place of the live block."""
        clear = f"\x1b[{self._height}A\x1b[J" if self._height else ""
        self._height = 0
        self.screen.write(clear + text)
