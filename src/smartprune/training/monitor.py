"""A run, followed from outside: its folder is read, and nothing in it is touched. The folder may be on another machine's disk."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .. import text
from ..reports.runlog import RunLog, finite_number, read_run_log
from ..run_files import CHECKPOINT, CONFIG, METRICS, RESULT, STAGE_NAMES, STAGES
from .progress import clock

SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=*#"
POINTS = 24  # of a small curve
QUIET = 120.0  # seconds without news that are worth a word, or three epochs
QUIET_WORDS = "  nothing new was written; it may have stopped"


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands after its last whole epoch."""

    log: RunLog
    age: float | None  # seconds since anything was written

    @property
    def ended(self) -> bool:
        return self.log.result is not None

    @property
    def quiet(self) -> bool:
        """Whether nothing was written for so long that the run may have died."""
        return not self.ended and self.age is not None and self.age > max(QUIET, 3 * _epoch_seconds(self.log))

    @property
    def left(self) -> float | None:
        """Seconds to go, at the pace of the last epochs of each stage; None where no pace is known."""
        log = self.log
        if not log.rows:
            return None
        paces = {stage: _pace(log, stage) for stage in STAGES}
        last = log.rows[-1]
        usual = paces[last["stage"]] or next((pace for pace in paces.values() if pace is not None), None)
        if usual is None:
            return None
        total = 0.0
        for stage in STAGES[STAGES.index(last["stage"]) :]:
            steps = log.stage_steps(stage) - (last["step"] if stage == last["stage"] else 0)
            total += steps * (paces[stage] or usual)
        return total


def _pace(log: RunLog, stage: str) -> float | None:
    """Seconds of a step, over the last epochs of a stage."""
    rows = [row for row in log.rows if row["stage"] == stage and finite_number(row.get("seconds")) is not None][-6:]
    steps = rows[-1]["step"] - rows[0]["step"] if rows else 0
    return max(0.0, float(rows[-1]["seconds"] - rows[0]["seconds"])) / float(steps) if steps > 0 else None


def snapshot(folder: str | Path) -> Snapshot:
    """Reads a run folder as it is now."""
    folder = Path(folder)
    times = []
    for name in (METRICS, CHECKPOINT, RESULT, CONFIG):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return Snapshot(read_run_log(folder), max(0.0, time.time() - max(times)) if times else None)


def lines(found: Snapshot, ascii_only: bool, width: int = 80) -> list[str]:
    """The state of a run in a few lines, none wider than ``width``."""
    log = found.log
    config, rows = log.config, log.rows
    named = [text.escape(str(config[key])) for key in ("model", "task", "method") if isinstance(config.get(key), str)]
    out = [", ".join([text.escape(str(log.folder)), *named])]
    if not rows:
        out.append("no epoch has ended yet" if not found.ended else "no metrics")
    for stage in STAGES:
        length = log.stage_steps(stage)
        own = [row for row in rows if row["stage"] == stage]
        done = own[-1]["step"] if own else 0
        if length:
            bar = text.bar(done, length, 24, ascii_only)
            out.append(f"{STAGE_NAMES[stage]:<11} {bar} {done:>7,}/{length:,}")
    if rows:
        last = rows[-1]
        if not found.ended:
            out.append(f"now         {STAGE_NAMES[last['stage']]}, epoch {last['epoch']:,}, step {last['step']:,}")
        for key, name, form in (
            ("loss", "loss", "{:.4f}"),
            (log.measure or "", text.escape(log.measure or ""), "{:.2%}"),
            ("tau", "tau", "{:.2e}"),
            ("undecided", "undecided", "{:,.0f}"),
            ("changed", "churn", "{:,.0f}"),
        ):
            values = [value for row in rows if (value := finite_number(row.get(key))) is not None]
            if values:
                out.append(
                    f"{name[:11]:<11} {form.format(values[-1]):>12}  {spark(values, ascii_only, log=key in ('tau', 'loss'))}"
                )
    if found.ended:
        figures = [f"{name} {value:.2%}" for name in ("dense", "pruned") if (value := log.result_number(name)) is not None]
        seconds = log.result_number("seconds")
        figures += [] if seconds is None else [f"{clock(seconds)} in all"]
        out.append(f"ended       {', '.join(figures)}".rstrip())
    elif found.left is not None:
        out.append(
            f"time left   {clock(found.left)}" + ("" if rows[-1]["stage"] == "finetune" else ", if later stages keep this pace")
        )
    if found.quiet and found.age is not None:
        out.append(f"quiet       nothing was written for {clock(found.age)}; it may have stopped")
    return [text.shorten(line, width) for line in out]


def _epoch_seconds(log: RunLog) -> float:
    pace = _pace(log, log.rows[-1]["stage"]) if log.rows else None
    return (pace or 0.0) * (log.steps_per_epoch or 0)


def spark(values: Sequence[float], ascii_only: bool, log: bool = False, points: int = POINTS) -> str:
    """A curve in characters: the mean of each stretch, from the lowest to the highest.

    >>> spark([0, 1, 2, 3, 4, 5], ascii_only=True)
    '_.-=*#'
    """
    if log:
        values = [math.log(value) for value in values if value > 0]
    if not values:
        return ""
    marks = ASCII_SPARKS if ascii_only else SPARKS
    count = min(points, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    if high == low:
        return marks[0] * count
    return "".join(marks[min(len(marks) - 1, int((mean - low) / (high - low) * len(marks)))] for mean in means)


def follow(
    folder: str | Path,
    every: float,
    stream: TextIO | None = None,
    live: bool | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Shows a run until it ends: over and over in the same place on a terminal, elsewhere only what is new, a line at a time."""
    stream = sys.stdout if stream is None else stream
    live = stream.isatty() if live is None else live
    ascii_only = not text.supports_unicode(stream)
    shown, said = 0, ""
    while True:
        found = snapshot(folder)
        if live:
            width = shutil.get_terminal_size((80, 24)).columns
            now = lines(found, ascii_only, width - 1)
            stream.write((f"\x1b[{shown}F" if shown else "") + "".join(f"\x1b[2K{line}\n" for line in now) + "\x1b[J")
            shown = len(now)
        else:
            line = one_line(found)
            if line != said:
                stream.write(f"{line}\n")
                said = line
        stream.flush()
        if found.ended:
            return found
        sleep(every)


def one_line(found: Snapshot) -> str:
    """The state in a line, for a log."""
    log = found.log
    if not log.rows:
        return "ended" if found.ended else "no epoch has ended yet" + QUIET_WORDS * found.quiet
    last = log.rows[-1]
    parts = [
        f"{STAGE_NAMES[last['stage']]:<11}",
        f"epoch {last['epoch']:>4}",
        f"step {last['step']:>6}/{log.stage_steps(last['stage'])}",
    ]
    for key, form in (
        ("loss", "loss {:.4f}"),
        (log.measure or "", f"{text.escape(log.measure or '')} {{:.2%}}"),
        ("tau", "tau {:.2e}"),
    ):
        if (value := finite_number(last.get(key))) is not None:
            parts.append(form.format(value))
    if (undecided := finite_number(last.get("undecided"))) is not None:
        parts.append(f"undecided {undecided:.0f}")
    if found.ended:
        pruned = log.result_number("pruned")
        parts.append("ended" if pruned is None else f"ended: {text.escape(log.measure or 'metric')} {pruned:.2%}")
    elif found.left is not None and not found.quiet:
        parts.append(f"{clock(found.left)} left")
    return "  ".join(parts) + QUIET_WORDS * found.quiet
