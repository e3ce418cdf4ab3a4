"""Progress of a training run: one live line on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TextIO

PLAIN_SECONDS = 5.0  # between plain lines
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6
GAP = "  "
DEFAULT_COLUMNS = 100
LAYOUTS = ((5, 0), (4, 0), (3, 0), (3, 1), (2, 1), (1, 1), (1, 2), (0, 2))  # the highest rank, and how short the parts are


@dataclass(frozen=True)
class Tick:
    """The state of a run. ``step`` of ``steps`` and ``epoch`` of ``epochs`` count this stage, ``done`` of ``total`` all stages."""

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
    epoch: int = 0  # the current one, from 1
    epochs: int = 0


class Screen:
    """A stream that ignores write errors: a run continues after the reader of its output has closed it."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.silent = False

    def columns(self) -> int:
        """The width of the terminal that this stream writes to."""
        try:
            return int(os.environ.get("COLUMNS", "")) or DEFAULT_COLUMNS
        except ValueError:
            pass
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or DEFAULT_COLUMNS
        except (AttributeError, OSError, ValueError):  # not a terminal
            return DEFAULT_COLUMNS

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
        self._start = (0.0, 0)  # time and step of the first tick of this stage
        self._last_line = 0.0
        self._stage = ""
        self._unfinished_line = self._temporary_line = False

    def __call__(self, tick: Tick) -> None:
        now = time.monotonic()
        is_new = tick.stage != self._stage
        if is_new:
            self._start, self._stage = (now, tick.step), tick.stage
        ended = tick.step >= tick.steps
        if self.live:
            self.screen.write(f"\r\x1b[K{self._live_line(tick, now)}" + "\n" * ended)
            self._unfinished_line, self._temporary_line = not ended, False
        elif ended or is_new or now - self._last_line >= PLAIN_SECONDS:
            self.screen.write(f"{self.line(tick, now)}\n")
            self._last_line = now

    def busy(self, text: str) -> None:
        """Says on a terminal what takes time after a stage. The next output replaces the line."""
        if self.live:
            self.close()
            self.screen.write(f"\r\x1b[K{text[: self.screen.columns() - 1]}")
            self._temporary_line = True

    def message(self, text: str) -> None:
        """Prints a separate line, below the live line."""
        self.close()
        self.screen.write(f"{text}\n")

    def close(self) -> None:
        """Ends the live line, so that later output starts on a new line."""
        if self._unfinished_line or self._temporary_line:
            self.screen.write("\n" if self._unfinished_line else "\r\x1b[K")
            self._unfinished_line = self._temporary_line = False

    def line(self, tick: Tick, now: float) -> str:
        """The whole line, as it is printed where there is no terminal."""
        width = len(str(tick.steps))
        step = f"step {tick.step:>{width}}/{tick.steps}"
        return GAP.join([f"{tick.stage:<8}", step, *(part.form(0) for part in self._parts(tick, now))])

    def _parts(self, tick: Tick, now: float) -> list[_Part]:
        """What a line says after the stage."""
        parts = []
        if tick.epochs:
            epoch = f"{tick.epoch:>{len(str(tick.epochs))}}/{tick.epochs}"
            parts.append(_Part(1, f"epoch {epoch}", f"ep {epoch}"))
        if tick.loss is not None:
            parts.append(_Part(2, f"loss {tick.loss:.4f}"))
        if tick.metric is not None:
            metric = f"{100 * tick.metric:.1f} %"
            parts.append(_Part(0, f"val {tick.measure} {metric}", f"val {tick.measure} {metric}", f"val {metric}"))
        if tick.tau:  # 0 once the mask is hard
            parts.append(_Part(5, f"tau {tick.tau:.1e}"))
        if tick.undecided is not None:
            parts.append(_Part(4, f"undecided {tick.undecided}"))
        if tick.empty_layers:
            parts.append(_Part(2, f"empty layers {tick.empty_layers}"))
        pace = self._seconds_per_step(tick, now)
        if pace is not None:
            parts.append(_Part(3, format_rate(pace, " step"), format_rate(pace, "")))
        if tick.step >= tick.steps:
            parts.append(_Part(0, f"elapsed {format_duration(tick.seconds)}", f"in {format_duration(tick.seconds)}"))
        elif pace is not None:
            parts.append(_Part(0, f"{format_duration(pace * (tick.total - tick.done))} left"))
        return parts

    def _seconds_per_step(self, tick: Tick, now: float) -> float | None:
        """The pace of this stage so far; None before its second tick. Later stages are expected to be as fast."""
        start, first = self._start
        return (now - start) / (tick.step - first) if tick.step > first and now > start else None

    def _live_line(self, tick: Tick, now: float) -> str:
        """A line with a bar as long as the stage runs. On a narrow terminal, words are shortened and parts left out."""
        columns = self.screen.columns() - 1
        parts, ended = self._parts(tick, now), tick.step >= tick.steps
        least = 0 if ended else MIN_BAR_WIDTH + len(GAP)
        for rank, short in LAYOUTS:
            texts = [part.form(short) for part in parts if part.rank <= rank]
            free = columns - len(GAP.join([f"{tick.stage:<8}", *texts]))
            if free >= least:
                break
        width = min(BAR_WIDTH, free - len(GAP))
        if not ended and width >= MIN_BAR_WIDTH:
            filled = width * tick.step // max(1, tick.steps)
            texts.insert(0, self.full * filled + self.empty * (width - filled))
        return GAP.join([f"{tick.stage:<8}", *texts])[:columns]


class _Part:
    """A part of a line, in its whole form and in shorter ones. Parts of a higher rank are left out first."""

    def __init__(self, rank: int, *forms: str) -> None:
        self.rank, self.forms = rank, forms

    def form(self, short: int) -> str:
        return self.forms[min(short, len(self.forms) - 1)]


def format_rate(seconds_per_step: float, unit: str = " step") -> str:
    """``52 steps/s``, ``1.3 steps/s``, or ``4.2 s/step`` for slow steps; without a unit ``52/s``."""
    if seconds_per_step > 1:
        return f"{seconds_per_step:.1f} s/step" if unit else f"{seconds_per_step:.1f} s"
    rate = 1 / seconds_per_step
    return (f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}") + (f"{unit}s/s" if unit else "/s")


def format_duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
