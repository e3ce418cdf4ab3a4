"""Reads a run folder for a report. Its files may be incomplete, damaged or forged, which is never an error here."""

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
from ..files import check_readable, parse_json, read_limited
from ..run_files import BENCH, COLUMNS, CONFIG, METRICS, RESULT, SCORES, STAGES

SAMPLE_SIZE = 64  # blocks whose mask is logged over time
MAX_FILE_BYTES, MAX_METRICS_BYTES = 1 << 20, 1 << 27

Row = dict[str, Any]


@dataclass(frozen=True)
class RunLog:
    """The files of a run folder. Any of them may be missing."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    rows: tuple[Row, ...] = ()
    bench: Mapping[str, Any] | None = None  # written by ``smartprune bench``

    def engine_times(self, batch: int = 1) -> dict[str, float]:
        """Milliseconds by engine at one batch size; empty without a benchmark."""
        rows = self.bench.get("timings") if self.bench is not None else None
        times = {}
        for row in rows if isinstance(rows, list) else []:
            ms = finite_number(row.get("ms")) if isinstance(row, dict) else None
            if ms is not None and ms > 0 and row.get("batch") == batch and row.get("failed") is None:
                times[str(row.get("engine"))] = ms
        return times

    @property
    def measure(self) -> str | None:
        """The name of the task's metric."""
        if self.result is not None and isinstance(self.result.get("measure"), str):
            return str(self.result["measure"])
        return next((name for row in self.rows for name in row if name not in COLUMNS), None)

    @property
    def title(self) -> str:
        """The name of the metric as a heading: ``Accuracy``, but ``mAP``."""
        name = self.measure or "metric"
        return name.capitalize() if name.islower() else name

    @property
    def steps_per_epoch(self) -> int | None:
        return next((row["step"] // row["epoch"] for row in self.rows if row["epoch"] > 0), None)

    def stage_steps(self, stage: str) -> int:
        """The steps of a stage, from the configuration and the rows; 0 where neither is known."""
        logged = max((row["step"] for row in self.rows if row["stage"] == stage), default=0)
        epochs = self.config.get(f"{stage}_epochs")
        if stage == "dense" and self.config.get("dense") is not None:
            return logged
        if not isinstance(epochs, int) or not 0 <= epochs < 10**6 or self.steps_per_epoch is None:
            return logged
        return max(logged, epochs * self.steps_per_epoch)

    def run_step(self, stage: str, step: int) -> int:
        """The step in the whole run of a step in one stage."""
        return sum(self.stage_steps(earlier) for earlier in STAGES[: STAGES.index(stage)]) + step

    def result_number(self, name: str) -> float | None:
        """A number of the result, such as ``"pruned"``."""
        return None if self.result is None else finite_number(self.result.get(name))


def sampled_blocks(n: int) -> list[int]:
    """The blocks that are logged over time: evenly spread, and always the same for the same ``n``.

    >>> sampled_blocks(3), sampled_blocks(640)[:3], len(sampled_blocks(640))
    ([0, 1, 2], [5, 15, 25], 64)
    """
    return list(range(n)) if n <= SAMPLE_SIZE else [(2 * i + 1) * n // (2 * SAMPLE_SIZE) for i in range(SAMPLE_SIZE)]


def read_run_log(folder: str | Path) -> RunLog:
    """Reads whatever a run folder holds."""
    folder = Path(folder)
    rows = tuple(read_rows(folder / METRICS))
    return RunLog(folder, _read_json(folder / CONFIG) or {}, _read_json(folder / RESULT), rows, _read_json(folder / BENCH))


def read_rows(path: Path) -> list[Row]:
    """The rows of ``metrics.jsonl``. Incomplete and invalid lines are left out."""
    try:
        data = read_limited(path, MAX_METRICS_BYTES)
    except SmartpruneError:
        return []
    rows = []
    for line in data.split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("stage") in STAGES and _is_count(row.get("step")) and _is_count(row.get("epoch")):
            rows.append(row)
    return rows


def read_scores(folder: Path, n: int) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The scores of all ``n`` blocks at the end of the search; None where they are not known."""
    try:
        check_readable(folder / SCORES)
        with safe_open(folder / SCORES, framework="numpy") as file:
            if list(file.keys()) != ["scores"] or file.get_slice("scores").get_shape() != [n]:
                return None
            scores = np.asarray(file.get_tensor("scores"), dtype=np.float32)
    except Exception:  # safetensors raises many types for files that are missing or damaged
        return None
    return scores if bool(np.isfinite(scores).all()) else None


def finite_number(value: object) -> float | None:
    """The value as a float if it is a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path))
    except SmartpruneError:
        return None
    return data if isinstance(data, dict) else None
