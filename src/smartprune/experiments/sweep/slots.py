"""How many jobs run at once on a GPU: as many as fit into its memory, and as long as more of them are faster together.

A sweep starts with one job and doubles the number while the jobs together gain speed. Both the memory and the speed are measured
on the jobs themselves: the memory by what is used after a job has started, the speed by the epochs in the jobs' metrics.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...run_files import METRICS

GAIN = 1.05  # twice the jobs must be faster by this factor
MARGIN = 1.2  # on the measured memory of a job
QUERY_SECONDS = 10.0


@dataclass(frozen=True)
class Memory:
    """Of a GPU, in MiB."""

    used: float
    total: float


@dataclass(frozen=True)
class Pace:
    """A running job: what kind of job it is, such as task and network, and the seconds that each finished epoch took."""

    kind: str
    epochs: tuple[tuple[str, float], ...] = ()  # stage, seconds


def gpu_memory() -> Memory | None:
    """The memory of the GPU that jobs use; None if nvidia-smi does not report it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [command, f"--id={first}", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True).stdout
        used, total = map(float, text.split("\n")[0].split(","))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Memory(used, total)


def once_a_second(read: Callable[[], Memory | None]) -> Callable[[], Memory | None]:
    """The same readings, but at most one call per second, because a sweep looks more often than nvidia-smi is cheap."""
    latest: tuple[float, Memory | None] = (-math.inf, None)

    def reading() -> Memory | None:
        nonlocal latest
        if time.monotonic() - latest[0] >= 1.0:
            latest = time.monotonic(), read()
        return latest[1]

    return reading


def read_pace(kind: str, folder: Path) -> Pace:
    """The epochs in the metrics of a run folder. A line that is being written is left out."""
    epochs, before = [], 0.0
    try:
        lines = (folder / METRICS).read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        try:
            row = json.loads(line)
            stage, seconds = str(row["stage"]), float(row["seconds"])
        except (ValueError, KeyError, TypeError):
            continue
        epochs.append((stage, seconds - before))
        before = seconds
    return Pace(kind, tuple(epochs))


@dataclass
class Slots:
    """The number of jobs that may run at once. It is fixed, or it grows up to ``most`` while more jobs are faster together."""

    most: int
    fixed: bool = True
    read_memory: Callable[[], Memory | None] = lambda: None
    limit: int = field(init=False)
    speeds: dict[int, float] = field(default_factory=dict)  # by number of jobs, in units of one job alone
    needs: dict[str, float] = field(default_factory=dict)  # MiB by kind of job
    _smaller: int = 0  # the number of jobs before the limit grew
    _fastest: dict[tuple[str, str], float] = field(default_factory=dict)  # seconds of an epoch, by kind and stage
    _seen: dict[str, int] = field(default_factory=dict)  # epochs of the running jobs when their set changed
    _started: list[str] = field(default_factory=list)  # kinds of the jobs whose memory is being measured
    _used_before: float | None = None  # before they started

    def __post_init__(self) -> None:
        self.limit = self.most if self.fixed else 1

    def may_start(self, kind: str, running: Mapping[str, Pace]) -> bool:
        """Whether another job of this kind may start now."""
        if len(running) >= self.limit:
            return False
        memory = self.read_memory()
        if memory is None or not running:
            return True
        starting = [pace.kind for pace in running.values() if not pace.epochs]
        if not {*starting, *self._started} <= set(self.needs):
            return False  # wait until the memory of the jobs that have started is known
        largest = max(self.needs.values(), default=memory.used / len(running))
        expected = sum(self.needs.get(name, largest) for name in [kind, *starting])
        return memory.used + MARGIN * expected <= memory.total

    def started(self, kind: str) -> None:
        """Call this just before a job starts."""
        if not self._started:
            memory = self.read_memory()
            self._used_before = None if memory is None else memory.used
        self._started.append(kind)

    def observe(self, running: Mapping[str, Pace]) -> str | None:
        """Measures memory and speed, and adapts the limit. Returns a sentence if the limit changed."""
        if self._seen.keys() - running.keys():  # a job has ended, so the memory of the others is not known
            self._started.clear()
        if self._seen.keys() != running.keys():
            self._seen = {name: len(pace.epochs) for name, pace in running.items()}
        self._measure_memory(running)
        if self.fixed or not running or any(len(pace.epochs) < self._seen[name] + 2 for name, pace in running.items()):
            return None  # not every job has made a whole epoch beside the others
        return self._adapt(len(running), self._speed(running))

    def _measure_memory(self, running: Mapping[str, Pace]) -> None:
        if not self._started or not all(pace.epochs for pace in running.values()):
            return
        memory = self.read_memory()
        if memory is not None and self._used_before is not None:
            each = max(0.0, memory.used - self._used_before) / len(self._started)
            self.needs |= {kind: max(each, self.needs.get(kind, 0.0)) for kind in self._started}
        self._started.clear()

    def _speed(self, running: Mapping[str, Pace]) -> float:
        """The speed of all jobs. A job counts as one if its last epoch was as fast as the fastest of its kind and stage."""
        total = 0.0
        for pace in running.values():
            stage, seconds = pace.epochs[-1]
            key, seconds = (pace.kind, stage), max(seconds, 1e-6)
            self._fastest[key] = min(seconds, self._fastest.get(key, seconds))
            total += self._fastest[key] / seconds
        return total

    def _adapt(self, jobs: int, speed: float) -> str | None:
        self.speeds[jobs] = speed
        if jobs != self.limit:
            return None
        smaller = self.speeds.get(self._smaller)
        if smaller is not None and speed < GAIN * smaller:
            text = f"{jobs} jobs together are {speed / smaller:.2f} times as fast as {self._smaller}: {self._smaller} from now on"
            self.limit, self.fixed = self._smaller, True
            return text
        if jobs >= self.most:
            self.fixed = True
            return None
        self._smaller, self.limit = jobs, min(2 * jobs, self.most)
        return f"{jobs} job{'s' * (jobs > 1)} at {speed:.2f} times the speed of one: trying {self.limit}"
