"""Monitoring of a run from outside: its folder is only read. It may be on a mounted disk of another machine."""

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
from .progress import format_duration

SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=*#"
POINTS = 24  # of a sparkline
STALLED_SECONDS = 120.0  # a run without output for so long, and for three epochs, may have stopped
STALLED = "  no new output; the run may have stopped"


@dataclass(frozen=True)
class Snapshot:
    """The state of a run after its last complete epoch."""

    log: RunLog
    age: float | None  # seconds since the last write

    @property
    def finished(self) -> bool:
        return self.log.result is not None

    @property
    def stalled(self) -> bool:
        """Whether nothing was written for so long that the run may have stopped."""
        return not self.finished and self.age is not None and self.age > max(STALLED_SECONDS, 3 * _epoch_seconds(self.log))

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the pace of the last epochs of each stage; None if no pace is known."""
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
    """Seconds per step over the last epochs of a stage."""
    rows = [row for row in log.rows if row["stage"] == stage and finite_number(row.get("seconds")) is not None][-6:]
    steps = rows[-1]["step"] - rows[0]["step"] if rows else 0
    return max(0.0, float(rows[-1]["seconds"] - rows[0]["seconds"])) / float(steps) if steps > 0 else None


def read_snapshot(folder: str | Path) -> Snapshot:
    """Reads the current state of a run folder."""
    folder = Path(folder)
    times = []
    for name in (METRICS, CHECKPOINT, RESULT, CONFIG):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return Snapshot(read_run_log(folder), max(0.0, time.time() - max(times)) if times else None)


def status_lines(snapshot: Snapshot, ascii_only: bool, width: int = 80) -> list[str]:
    """The state of a run in a few lines of at most ``width`` columns."""
    log = snapshot.log
    config, rows = log.config, log.rows
    named = [text.escape(str(config[key])) for key in ("model", "task", "method") if isinstance(config.get(key), str)]
    out = [", ".join([text.escape(str(log.folder)), *named])]
    if not rows:
        out.append("no epoch has finished yet" if not snapshot.finished else "no metrics")
    for stage in STAGES:
        length = log.stage_steps(stage)
        stage_rows = [row for row in rows if row["stage"] == stage]
        done = stage_rows[-1]["step"] if stage_rows else 0
        if length:
            bar = text.bar(done, length, 24, ascii_only)
            out.append(f"{STAGE_NAMES[stage]:<12} {bar} {done:>7,}/{length:,}")
    if rows:
        last = rows[-1]
        if not snapshot.finished:
            out.append(f"now          {STAGE_NAMES[last['stage']]}, epoch {last['epoch']:,}, step {last['step']:,}")
        for key, name, form in (
            ("loss", "loss", "{:.4f}"),
            (log.measure or "", f"val {text.escape(log.measure or '')}", "{:.2%}"),
            ("tau", "tau", "{:.2e}"),
            ("undecided", "undecided", "{:,.0f}"),
            ("changed", "churn", "{:,.0f}"),
        ):
            values = [value for row in rows if (value := finite_number(row.get(key))) is not None]
            if values:
                last_value = "hard mask" if key == "tau" and not values[-1] else form.format(values[-1])
                out.append(f"{name[:12]:<12} {last_value:>12}  {sparkline(values, ascii_only, log=key in ('tau', 'loss'))}")
    if snapshot.finished:
        test = f"test {text.escape(log.measure or 'metric')}: "
        figures = [f"{name} {value:.2%}" for name in ("dense", "pruned") if (value := log.result_number(name)) is not None]
        seconds = log.result_number("seconds")
        figures += [] if seconds is None else [f"elapsed {format_duration(seconds)}"]
        out.append(f"finished     {test}{', '.join(figures)}".rstrip())
    elif snapshot.seconds_left is not None:
        out.append(
            f"time left    {format_duration(snapshot.seconds_left)}"
            + ("" if rows[-1]["stage"] == "finetune" else ", if later stages run at the same pace")
        )
    if snapshot.stalled and snapshot.age is not None:
        out.append(f"stalled      no new output for {format_duration(snapshot.age)}; the run may have stopped")
    return [text.shorten(line, width) for line in out]


def _epoch_seconds(log: RunLog) -> float:
    pace = _pace(log, log.rows[-1]["stage"]) if log.rows else None
    return (pace or 0.0) * (log.steps_per_epoch or 0)


def sparkline(values: Sequence[float], ascii_only: bool, log: bool = False, points: int = POINTS) -> str:
    """A curve in characters: the means of ``points`` equal parts, scaled from the lowest to the highest.

    >>> sparkline([0, 1, 2, 3, 4, 5], ascii_only=True)
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
    """Shows a run until it is finished: in place on a terminal, elsewhere one line for every change."""
    stream = sys.stdout if stream is None else stream
    live = stream.isatty() if live is None else live
    ascii_only = not text.supports_unicode(stream)
    height, last_line = 0, ""
    while True:
        snapshot = read_snapshot(folder)
        if live:
            width = shutil.get_terminal_size((80, 24)).columns
            now = status_lines(snapshot, ascii_only, width - 1)
            stream.write((f"\x1b[{height}F" if height else "") + "".join(f"\x1b[2K{line}\n" for line in now) + "\x1b[J")
            height = len(now)
        else:
            line = status_line(snapshot)
            if line != last_line:
                stream.write(f"{line}\n")
                last_line = line
        stream.flush()
        if snapshot.finished:
            return snapshot
        sleep(every)


def status_line(snapshot: Snapshot) -> str:
    """The state of a run in one line, for a log."""
    log = snapshot.log
    if not log.rows:
        return "finished" if snapshot.finished else "no epoch has finished yet" + STALLED * snapshot.stalled
    last = log.rows[-1]
    parts = [
        f"{STAGE_NAMES[last['stage']]:<11}",
        f"epoch {last['epoch']:>4}",
        f"step {last['step']:>6}/{log.stage_steps(last['stage'])}",
    ]
    for key, form in (
        ("loss", "loss {:.4f}"),
        (log.measure or "", f"val {text.escape(log.measure or '')} {{:.2%}}"),
        ("tau", "tau {:.2e}"),
    ):
        value = finite_number(last.get(key))
        if value is not None and (value or key != "tau"):  # 0 once the mask is hard
            parts.append(form.format(value))
    if (undecided := finite_number(last.get("undecided"))) is not None:
        parts.append(f"undecided {undecided:.0f}")
    if snapshot.finished:
        pruned = log.result_number("pruned")
        parts.append("finished" if pruned is None else f"finished: test {text.escape(log.measure or 'metric')} {pruned:.2%}")
    elif snapshot.seconds_left is not None and not snapshot.stalled:
        parts.append(f"{format_duration(snapshot.seconds_left)} left")
    return "  ".join(parts) + STALLED * snapshot.stalled
