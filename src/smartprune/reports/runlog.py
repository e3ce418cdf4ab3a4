"""A run folder as a report reads it: plain files that may be half written, cut off or made up, never an error for that."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from ..errors import SmartpruneError
from ..files import parse_json, read_limited
from ..run_files import BENCH, CONFIG, METRICS, RESULT, SCORES, STAGES

SAMPLE = 64  # blocks whose mask is followed over time
LARGEST_FILE, MOST_METRICS = 1 << 20, 1 << 27
# what a row may hold besides the task's measure
PLACE = ("stage", "epoch", "step", "seconds")
OTHERS = (*PLACE, "loss", "lr", "tau", "theta", "undecided", "changed", "gap", "kept", "collapsed", "graph", "sample")

Row = dict[str, Any]


@dataclass(frozen=True)
class Story:
    """What is known about a run; anything may be missing."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    rows: tuple[Row, ...] = ()
    bench: Mapping[str, Any] | None = None  # what ``smartprune bench`` wrote

    def times(self, batch: int = 1) -> dict[str, float]:
        """Milliseconds by engine, for one batch size; nothing where nothing was measured."""
        rows = self.bench.get("timings") if self.bench is not None else None
        out = {}
        for row in rows if isinstance(rows, list) else []:
            ms = number(row.get("ms")) if isinstance(row, dict) else None
            if ms is not None and ms > 0 and row.get("batch") == batch and row.get("failed") is None:
                out[str(row.get("engine"))] = ms
        return out

    @property
    def measure(self) -> str | None:
        """The name of the task's metric."""
        if self.result is not None and isinstance(self.result.get("measure"), str):
            return str(self.result["measure"])
        return next((name for row in self.rows for name in row if name not in OTHERS), None)

    @property
    def title(self) -> str:
        """The same at the beginning of a line: ``Accuracy``, but ``mAP``."""
        name = self.measure or "metric"
        return name.capitalize() if name.islower() else name

    @property
    def per_epoch(self) -> int | None:
        """Steps of an epoch."""
        return next((row["step"] // row["epoch"] for row in self.rows if row["epoch"] > 0), None)

    def length(self, stage: str) -> int:
        """Steps of a stage, as the configuration and the rows say; 0 where neither does."""
        seen = max((row["step"] for row in self.rows if row["stage"] == stage), default=0)
        epochs = self.config.get(f"{stage}_epochs")
        if stage == "dense" and self.config.get("dense") is not None:
            return seen
        if not isinstance(epochs, int) or not 0 <= epochs < 10**6 or self.per_epoch is None:
            return seen
        return max(seen, epochs * self.per_epoch)

    def at(self, stage: str, step: int) -> int:
        """The step of the whole run."""
        return sum(self.length(earlier) for earlier in STAGES[: STAGES.index(stage)]) + step

    def figure(self, name: str) -> float | None:
        """A number of the result, such as ``"pruned"``."""
        return None if self.result is None else number(self.result.get(name))


def sampled(n: int) -> list[int]:
    """The blocks that are followed over time: evenly spread, always the same for the same ``n``.

    >>> sampled(3), sampled(640)[:3], len(sampled(640))
    ([0, 1, 2], [5, 15, 25], 64)
    """
    return list(range(n)) if n <= SAMPLE else [(2 * i + 1) * n // (2 * SAMPLE) for i in range(SAMPLE)]


def read_story(folder: str | Path) -> Story:
    """Whatever a run folder says about its run."""
    folder = Path(folder)
    rows = tuple(read_rows(folder / METRICS))
    return Story(folder, _read(folder / CONFIG) or {}, _read(folder / RESULT), rows, _read(folder / BENCH))


def read_rows(path: Path) -> list[Row]:
    """The rows of ``metrics.jsonl``. A last line that is still being written is left out, and so is any that is no row."""
    try:
        data = read_limited(path, MOST_METRICS)
    except SmartpruneError:
        return []
    out = []
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("stage") in STAGES and _counts(row.get("step")) and _counts(row.get("epoch")):
            out.append(row)
    return out


def read_scores(folder: Path, n: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The scores of all ``n`` blocks at the end of the search, or None where they are not known."""
    try:
        with safe_open(folder / SCORES, framework="numpy") as file:
            if list(file.keys()) != ["scores"] or file.get_slice("scores").get_shape() != [n]:
                return None
            found = np.asarray(file.get_tensor("scores"), dtype=np.float32)
    except Exception:  # absent or damaged, which safetensors says in many ways
        return None
    return found if bool(np.isfinite(found).all()) else None


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _counts(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(read_limited(path, LARGEST_FILE), str(path))
    except SmartpruneError:
        return None
    return found if isinstance(found, dict) else None
