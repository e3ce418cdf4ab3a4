"""Progress of a training run: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

QUIET_SECONDS = 5.0  # between lines where there is no terminal
BAR, SHORTEST_BAR = 24, 4


@dataclass(frozen=True)
class Tick:
    """Where a run stands. ``done`` of ``total`` counts the steps of all stages, ``step`` of ``steps`` of this one."""

    stage: str
    step: int
    steps: int
    done: int
    total: int
    loss: float | None
    measure: str
    value: float | None  # of the measure, on the validation split
    tau: float | None
    undecided: int | None
    seconds: float
    empty: int = 0  # layers that a search left without a block


class Screen:
    """A stream that is written to as long as that can be done: no run ends because nobody reads it any more."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.silent = False

    def write(self, text: str) -> None:
        if self.silent:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # its reader went away, the disk is full, or it is closed
            self.silent = True


class Progress:
    """Shows ticks. Never raises because of what the terminal can or cannot show; once it cannot be written to, it is silent."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self.screen = Screen(stream)
        self.live = self.screen.stream.isatty() if live is None else live
        encoding = getattr(self.screen.stream, "encoding", None) or "ascii"
        self.full, self.empty = ("█", "░") if "utf" in encoding.lower() else ("#", "-")
        self._began: tuple[float, int] | None = None
        self._shown = 0.0
        self._stage = ""
        self._open = False

    def __call__(self, tick: Tick) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = (now, tick.done)
        ended = tick.step >= tick.steps
        if self.live:
            self.screen.write(f"\r\x1b[K{self._live_line(tick, now)}" + "\n" * ended)
            self._open = not ended
        elif ended or tick.stage != self._stage or now - self._shown >= QUIET_SECONDS:
            self.screen.write(f"{self.line(tick, now)}\n")
            self._shown = now
        self._stage = tick.stage

    def say(self, text: str) -> None:
        """A line of its own, below the live line."""
        self.close()
        self.screen.write(f"{text}\n")

    def close(self) -> None:
        """Leaves the live line, so that what comes next starts on a new one."""
        if self._open:
            self.screen.write("\n")
            self._open = False

    def line(self, tick: Tick, now: float) -> str:
        width = len(str(tick.steps))
        parts = [f"{tick.stage:<8}", f"{tick.step:>{width}}/{tick.steps}"]
        if tick.loss is not None:
            parts.append(f"loss {tick.loss:.4f}")
        if tick.value is not None:
            parts.append(f"{tick.measure} {100 * tick.value:.1f} %")
        if tick.tau is not None:
            parts.append(f"tau {tick.tau:.1e}")
        if tick.undecided is not None:
            parts.append(f"undecided {tick.undecided}")
        if tick.empty:
            parts.append(f"empty layers {tick.empty}")
        if tick.step >= tick.steps:
            parts.append(f"{clock(tick.seconds)} in all")
        elif (left := self._left(tick, now)) is not None:
            parts.append(f"{clock(left)} left")
        return "  ".join(parts)

    def _left(self, tick: Tick, now: float) -> float | None:
        if self._began is None or tick.done <= self._began[1]:
            return None
        return (now - self._began[0]) / (tick.done - self._began[1]) * (tick.total - tick.done)

    def _live_line(self, tick: Tick, now: float) -> str:
        """The line with a bar in it, as long as the terminal leaves room for."""
        text, columns = self.line(tick, now), shutil.get_terminal_size((100, 20)).columns - 1
        room = min(BAR, columns - len(text) - 2)
        if room >= SHORTEST_BAR:
            filled = room * tick.step // max(1, tick.steps)
            text = f"{text[:8]}  {self.full * filled}{self.empty * (room - filled)}{text[8:]}"
        return text[:columns]


def clock(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
