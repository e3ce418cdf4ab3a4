"""Groups finished runs into rows and rows into tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import text
from ...errors import SmartpruneError
from ...methods import METHODS
from ...training.config import OWN_SETTINGS
from .identity import RunKey, protocol, run_key
from .runs import FinishedRun, Group, find_run_folders, read_run
from .table import comparison_csv, comparison_text


@dataclass(frozen=True)
class Row:
    """Runs of one method with one budget that differ only in their seeds."""

    runs: tuple[FinishedRun, ...]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def share(self) -> tuple[str, float]:
        return self.runs[0].share

    @property
    def values(self) -> list[float]:
        return [run.pruned for run in self.runs]

    @property
    def dense(self) -> list[float]:
        return [run.dense for run in self.runs]

    @property
    def difference(self) -> float:
        """The mean metric of the pruned models minus the mean metric of the dense models."""
        return statistics.fmean(self.values) - statistics.fmean(self.dense)

    @property
    def macs_left(self) -> list[float]:
        """The share of the MACs of the pruned layers that is left in every run; empty unless all runs know it."""
        shares = [run.macs_left for run in self.runs if run.macs_left is not None]
        return shares if len(shares) == len(self.runs) else []

    @property
    def blocks_removed(self) -> list[float]:
        """The sparsity that every run reached, as in its receipt; empty unless all runs have a receipt."""
        shares = [run.blocks_removed for run in self.runs if run.blocks_removed is not None]
        return shares if len(shares) == len(self.runs) else []

    def to_json(self) -> dict[str, Any]:
        first = self.runs[0]
        config, (name, share) = first.config, first.share
        return {
            "model": config["model"],
            "data": first.data,
            "method": first.method,
            "settings": config["settings"],
            "block": config["block"],
            **dict.fromkeys(OWN_SETTINGS),
            name: share,
            "protocol": protocol(config),
            "metric": first.metric,
            "unit": "share",
            "split": "test, after the last epoch",
            **summary(self.values),
            "seeds": [run.config["seed"] for run in self.runs],
            "dense": {**summary(self.dense)},
            "difference": self.difference,
            "seconds": [run.seconds for run in self.runs],
            **({"blocks_removed": self.blocks_removed} if self.blocks_removed else {}),
            **({"macs_left": self.macs_left} if self.macs_left else {}),
        }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Values with their mean, sample standard deviation (None for a single value) and n.

    >>> summary([1.0, 2.0, 3.0])
    {'values': [1.0, 2.0, 3.0], 'mean': 2.0, 'std': 1.0, 'n': 3}
    """
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.fmean(values), "std": std, "n": len(values)}


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`. ``str`` is the table; ``left_out`` are folders that could not be used, with reasons."""

    rows: tuple[Row, ...]
    left_out: tuple[tuple[Path, str], ...]

    @property
    def runs(self) -> tuple[FinishedRun, ...]:
        return tuple(run for row in self.rows for run in row.runs)

    def groups(self) -> dict[Group, list[Row]]:
        """The rows of each table."""
        groups: dict[Group, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.runs[0].group, []).append(row)
        return groups

    def titles(self) -> dict[Group, str]:
        """A title per table. Tables of the same task, model and block also name what differs in how their runs were trained."""
        groups = list(self.groups())
        return {group: ", ".join([_base_title(group), *_differences(group, groups)]) for group in groups}

    def to_json(self) -> dict[str, Any]:
        """Plain data with ``rows``, as in every result file in records/."""
        versions = {json.dumps(run.versions, sort_keys=True): run.versions for run in self.runs}
        return {"rows": [row.to_json() for row in self.rows], "versions": list(versions.values())}

    def csv(self) -> str:
        """One line per run."""
        return comparison_csv(self)

    def __str__(self) -> str:
        return comparison_text(self, text.stdout_is_ascii())


def _base_title(group: Group) -> str:
    data, model, block, *_ = group
    return f"{data}, {model}, blocks of {block}"


def _differences(group: Group, groups: Sequence[Group]) -> list[str]:
    """The parts of a protocol, and the metric, that other groups with the same base title do not have."""
    similar = [(*other[3].split(", "), other[4]) for other in groups if _base_title(other) == _base_title(group)]
    return [part for part in (*group[3].split(", "), group[4]) if not all(part in parts for parts in similar)]


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Reads run folders, folders that hold run folders at any depth, and globs of both."""
    runs: list[FinishedRun] = []
    left_out: list[tuple[Path, str]] = []
    seen: dict[RunKey, Path] = {}
    for folder, reason in find_run_folders(paths):
        if reason is not None:
            left_out.append((folder, reason))
            continue
        try:
            run = read_run(folder)
            key, _ = run_key(run.config), (run.group, run.share, run.method)
        except SmartpruneError as error:
            left_out.append((folder, str(error)))
            continue
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            left_out.append((folder, f"its configuration is damaged ({type(error).__name__}: {error})"))
            continue
        if key in seen:
            left_out.append((folder, f"same settings and seed as {seen[key]}; counted once"))
            continue
        seen[key] = folder
        runs.append(run)
    if not runs:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out)
        raise SmartpruneError(f"nothing to compare; give folders of finished runs ({reasons})")
    return Comparison(tuple(_rows(runs)), tuple(left_out))


def _rows(runs: Sequence[FinishedRun]) -> Iterator[Row]:
    positions = {name: position for position, name in enumerate(METHODS)}

    def sort_key(run: FinishedRun) -> tuple[Any, ...]:
        position = positions.get(run.config["method"], len(positions))
        return run.group, position, run.method, run.share, run.config["seed"]

    rows: dict[tuple[Any, ...], list[FinishedRun]] = {}
    for run in sorted(runs, key=sort_key):
        rows.setdefault(sort_key(run)[:-1], []).append(run)
    for row in rows.values():
        yield Row(tuple(row))
