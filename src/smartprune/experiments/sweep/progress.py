"""Progress of a sweep: a live block on a terminal, one line per finished run elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

from ...text import shorten
from ...training.progress import GAP, Screen, format_duration

LIVE_SECONDS = 0.5  # between updates of the live block
NAME_WIDTH = 40


@dataclass(frozen=True)
class RunStatus:
    """A running job, with the last line of its log."""

    name: str
    last_line: str
    seconds: float


@dataclass(frozen=True)
class SweepStatus:
    done: int
    total: int
    failed: int
    seconds_left: float | None
    running: list[RunStatus]


class SweepProgress:
    """Shows the status of a sweep. It stops writing where the stream cannot be written to."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.screen = Screen(stream)
        self.live = self.screen.stream.isatty() if live is None else live
        self._height = 0
        self._shown = 0.0

    def show(self, status: SweepStatus) -> None:
        """Updates the live block."""
        now = time.monotonic()
        if not self.live or now - self._shown < LIVE_SECONDS:
            return
        self._shown = now
        columns = self.screen.columns() - 1
        head = f"sweep  {status.done}/{status.total} done, {len(status.running)} running"
        head += f", {status.failed} failed" if status.failed else ""
        head += f", about {format_duration(status.seconds_left)} left" if status.seconds_left is not None else ""
        width = min(NAME_WIDTH, max((len(run.name) for run in status.running), default=0), columns // 2)
        lines = [head[:columns]]
        for run in status.running:
            start = f"  {shorten(run.name, width):<{width}}  {format_duration(run.seconds):>5}  "
            lines.append(start[:columns] + whole_parts(run.last_line, max(0, columns - len(start))))
        self._write("".join(f"{line}\n" for line in lines))
        self._height = len(lines)

    def message(self, text: str) -> None:
        """Writes a line above the live block."""
        self._write(f"{text}\n")

    def close(self) -> None:
        """Clears the live block."""
        self._write("")

    def _write(self, text: str) -> None:
        """Writes in place of the live block."""
        clear = f"\x1b[{self._height}A\x1b[J" if self._height else ""
        self._height = 0
        self.screen.write(clear + text)


def whole_parts(line: str, width: int) -> str:
    """The parts of a line of progress that fit, from its start. Two spaces separate parts.

    >>> whole_parts("search    epoch 1/8  loss 0.0533", 25)
    'search    epoch 1/8'
    """
    if len(line) <= width:
        return line
    return line[: width + len(GAP)].rpartition(GAP)[0].rstrip() or line[:width]
