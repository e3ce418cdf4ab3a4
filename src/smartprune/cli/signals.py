"""Signals that stop a command at the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(message: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one has its usual effect.

    Yields a function that returns whether a stop was requested.
    """
    requested = False
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def request(number: int, frame: object) -> None:
        nonlocal requested
        requested = True
        restore()

    def stop() -> bool:
        if requested:
            message("stopping: writing a checkpoint")
        return requested

    for number in numbers:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()
