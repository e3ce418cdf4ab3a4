"""Progress of a training run: one live line on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

PLAIN_SECONDS = 5.0  # between plain lines
BAR_WIDTH, MIN_BAR_WIDTH = 24, 4


@dataclass(frozen=True)
class Tick:
    """The state of a run. ``step`` of ``steps`` counts this stage, ``done`` of ``total`` all stages."""

    stage: str
    step: int
    steps: int
    done: int
    total: int
    loss: float | None
    measure: str
    metric: float | None  # the measure on the validation split
    tau: float | None
    undecided: int | None
    seconds: float
    empty_layers: int = 0  # layers that lost all their blocks in the search


class Screen:
    """A stream that ignores write errors: a run does not fail because nobody reads its output any more."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.silent = False

    def write(self, text: str) -> None:
        if self.silent:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the reader is gone, the disk is full, or the stream is closed
            self.silent = True


class Progress:
    """Prints ticks. Never raises because of the terminal; after a write error it stays silent."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.screen = Screen(stream)
        self.live = self.screen.stream.isatty() if live is None else live
        encoding = getattr(self.screen.stream, "encoding", None) or "ascii"
        self.full, self.empty = ("█", "░") if "utf" in encoding.lower() else ("#", "-")
        self._start: tuple[float, int] | None = None  # time and step of the first tick
        self._last_line = 0.0
        self._stage = ""
        self._unfinished_line = False

    def __call__(self, tick: Tick) -> None:
        now = time.monotonic()
        if self._start is None:
            self._start = (now, tick.done)
        ended = tick.step >= tick.steps
        if self.live:
            self.screen.write(f"\r\x1b[K{self._live_line(tick, now)}" + "\n" * ended)
            self._unfinished_line = not ended
        elif ended or tick.stage != self._stage or now - self._last_line >= PLAIN_SECONDS:
            self.screen.write(f"{self.line(tick, now)}\n")
            self._last_line = now
        self._stage = tick.stage

    def message(self, text: str) -> None:
        """Prints a separate line, below the live line."""
        self.close()
        self.screen.write(f"{text}\n")

    def close(self) -> None:
        """Ends the live line, so that later output starts on a new line."""
        if self._unfinished_line:
            self.screen.write("\n")
            self._unfinished_line = False

    def line(self, tick: Tick, now: float) -> str:
        width = len(str(tick.steps))
        parts = [f"{tick.stage:<8}", f"{tick.step:>{width}}/{tick.steps}"]
        if tick.loss is not None:
            parts.append(f"loss {tick.loss:.4f}")
        if tick.metric is not None:
            parts.append(f"{tick.measure} {100 * tick.metric:.1f} %")
        if tick.tau:  # 0 once the mask is hard
            parts.append(f"tau {tick.tau:.1e}")
        if tick.undecided is not None:
            parts.append(f"undecided {tick.undecided}")
        if tick.empty_layers:
            parts.append(f"empty layers {tick.empty_layers}")
        if tick.step >= tick.steps:
            parts.append(f"elapsed {format_duration(tick.seconds)}")
        elif (left := self._seconds_left(tick, now)) is not None:
            parts.append(f"{format_duration(left)} left")
        return "  ".join(parts)

    def _seconds_left(self, tick: Tick, now: float) -> float | None:
        if self._start is None or tick.done <= self._start[1]:
            return None
        return (now - self._start[0]) / (tick.done - self._start[1]) * (tick.total - tick.done)

    def _live_line(self, tick: Tick, now: float) -> str:
        """The line with a bar in it, if the terminal is wide enough."""
        text, columns = self.line(tick, now), shutil.get_terminal_size((100, 20)).columns - 1
        width = min(BAR_WIDTH, columns - len(text) - 2)
        if width >= MIN_BAR_WIDTH:
            filled = width * tick.step // max(1, tick.steps)
            text = f"{text[:8]}  {self.full * filled}{self.empty * (width - filled)}{text[8:]}"
        return text[:columns]


def format_duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
