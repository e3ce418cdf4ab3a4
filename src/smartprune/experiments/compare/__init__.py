"""Finished runs side by side: method by sparsity, with mean, standard deviation, n, and the dense model they began with.

Only like is put next to like: runs are grouped by task, model, block and protocol, and a method's settings that are not
its defaults become part of its name. A folder that cannot be used is named with the reason and stops nothing.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import text
from ...errors import SmartpruneError
from ...fields import Fields
from ...files import parse_json, read_limited
from ...methods import METHODS
from ...run_files import CONFIG, RECEIPT, RESULT
from ...tasks import TASKS
from ...training.config import BUDGETS, asked
from .names import method_name, named, plain

LARGEST_FILE, LARGEST_RECEIPT = 1 << 20, 1 << 26
# what differs between runs of one table, and what only says where and how fast a run was
APART = ("task", "task_settings", "model", "method", "settings", "block", *BUDGETS, "seed")
ASIDE = ("out", "dense", "device", "threads", "compile", "graph", "checkpoint_seconds", "parallel", "tensorboard", "onnx")
# settings that change nothing at this value, and settings that only go with another one
NEUTRAL = {
    "amp": "off", "schedule_over": "stage", "accumulate": 1, "warmup_epochs": 0, "clip_norm": 0, "ema": 0, "distill": 0,
    "augment": 0, "deterministic": "off", "sync_bn": "off",
}  # fmt: skip
GOES_WITH = {"warmup_start": "warmup_epochs", "distill_temperature": "distill", "augment_over": "augment"}
MOST_SEEDS, LONGEST = 10_000, 10_000  # of a row; letters of a text in it
# task, model, block, protocol, method, budget, seed: two runs of which all this is the same are the same run
Key = tuple[str, str, str, str, str, tuple[str, float], int]


@dataclass(frozen=True)
class Entry:
    """A finished run: its settings, the metric of the test split before and after, and the share of the MACs of its pruned
    layers that is left, where its receipt tells it."""

    folder: Path
    config: dict[str, Any]
    metric: str
    pruned: float
    dense: float
    seconds: float
    versions: dict[str, str]
    macs_left: float | None = None

    @property
    def data(self) -> str:
        """The task, with the settings that are not its own."""
        return _data(self.config)

    @property
    def method(self) -> str:
        """The method, with the settings that are not its defaults."""
        return method_name(self.config["method"], self.config["settings"])

    @property
    def group(self) -> tuple[str, str, str, str, str]:
        return self.data, self.config["model"], self.config["block"], protocol(self.config), self.metric

    @property
    def share(self) -> tuple[str, float]:
        """``("sparsity", 0.9)`` or ``("macs", 0.5)``."""
        return asked(self.config)


@dataclass(frozen=True)
class Row:
    """The runs of one method at one sparsity that differ in their seeds alone."""

    entries: tuple[Entry, ...]

    @property
    def values(self) -> list[float]:
        return [entry.pruned for entry in self.entries]

    @property
    def dense(self) -> list[float]:
        return [entry.dense for entry in self.entries]

    @property
    def difference(self) -> float:
        return statistics.fmean(self.values) - statistics.fmean(self.dense)

    @property
    def macs_left(self) -> list[float]:
        """Of every run; none unless all of them tell it."""
        found = [entry.macs_left for entry in self.entries if entry.macs_left is not None]
        return found if len(found) == len(self.entries) else []

    def to_json(self) -> dict[str, Any]:
        first = self.entries[0]
        return {
            "model": first.config["model"],
            "data": first.data,
            "method": first.method,
            "settings": first.config["settings"],
            "block": first.config["block"],
            "sparsity": first.config.get("sparsity"),
            "macs": first.config.get("macs"),
            **({"cycles": first.config["cycles"]} if first.config.get("cycles") is not None else {}),
            "protocol": protocol(first.config),
            "metric": first.metric,
            "unit": "share",
            "split": "test, after the last epoch",
            **summary(self.values),
            "seeds": [entry.config["seed"] for entry in self.entries],
            "dense": {**summary(self.dense)},
            "difference": self.difference,
            "seconds": [entry.seconds for entry in self.entries],
            **({"macs_left": self.macs_left} if self.macs_left else {}),
        }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Values with their mean, their standard deviation (of a sample; None for a single value) and n.

    >>> summary([1.0, 2.0, 3.0])
    {'values': [1.0, 2.0, 3.0], 'mean': 2.0, 'std': 1.0, 'n': 3}
    """
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"values": list(values), "mean": statistics.fmean(values), "std": std, "n": len(values)}


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found. ``str`` is the table; ``left_out`` are folders that could not be used, and why."""

    rows: tuple[Row, ...]
    left_out: tuple[tuple[Path, str], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for row in self.rows for entry in row.entries)

    def groups(self) -> dict[tuple[str, str, str, str, str], list[Row]]:
        out: dict[tuple[str, str, str, str, str], list[Row]] = {}
        for row in self.rows:
            out.setdefault(row.entries[0].group, []).append(row)
        return out

    def to_json(self) -> dict[str, Any]:
        """The form of every result file in records/: plain data with ``rows``."""
        versions = {json.dumps(entry.versions, sort_keys=True): entry.versions for entry in self.entries}
        return {"rows": [row.to_json() for row in self.rows], "versions": list(versions.values())}

    def csv(self) -> str:
        """One line per run."""
        from .table import comparison_csv

        return comparison_csv(self)

    def __str__(self) -> str:
        from .table import comparison_text

        return comparison_text(self, text.stdout_is_ascii())


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Reads run folders, folders that hold some at any depth, and globs of both."""
    entries: list[Entry] = []
    left_out: list[tuple[Path, str]] = []
    seen: dict[Key, Path] = {}
    for folder, reason in _folders(paths):
        if reason is not None:
            left_out.append((folder, reason))
            continue
        try:
            entry = read_entry(folder)
            same, _ = key(entry.config), (entry.group, entry.share, entry.method)
        except SmartpruneError as error:
            left_out.append((folder, str(error)))
            continue
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            left_out.append((folder, f"its configuration is damaged ({type(error).__name__}: {error})"))
            continue
        if same in seen:
            left_out.append((folder, f"the same settings and seed as {seen[same]}; counted once"))
            continue
        seen[same] = folder
        entries.append(entry)
    if not entries:
        reasons = "; ".join(f"{folder}: {reason}" for folder, reason in left_out)
        raise SmartpruneError(f"there is nothing to compare; give folders of finished runs ({reasons})")
    return Comparison(tuple(_rows(entries)), tuple(left_out))


def _rows(entries: Sequence[Entry]) -> Iterator[Row]:
    order = {name: number for number, name in enumerate(METHODS)}

    def place(entry: Entry) -> tuple[Any, ...]:
        name = entry.config["method"]
        return entry.group, order.get(name, len(order)), entry.method, entry.share, entry.config["seed"]

    rows: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in sorted(entries, key=place):
        rows.setdefault(place(entry)[:-1], []).append(entry)
    for found in rows.values():
        yield Row(tuple(found))


def _folders(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str | None]]:
    """Every run folder once, or a path with the reason why it leads to none."""
    seen: set[Path] = set()
    for path in map(str, paths):
        places = [Path(path)] if Path(path).exists() else [Path(found) for found in sorted(glob.glob(path))]
        if not places:
            yield Path(path), "there is no such folder"
        for place in places:
            closed: list[OSError] = []
            found = list(_below(place, closed)) if place.is_dir() else []
            for error in closed:
                yield Path(error.filename), f"cannot be read ({error.strerror}); make it readable"
            if not found and not closed:
                yield place, f"holds no run (no {CONFIG})" if place.is_dir() else "is a file; give the run folder"
            for folder in found:
                if folder.resolve() not in seen:
                    seen.add(folder.resolve())
                    yield folder, None


def _below(place: Path, closed: list[OSError]) -> Iterator[Path]:
    """The run folders in a folder; ``closed`` takes what says of others that they cannot be read."""
    for where, folders, names in os.walk(place, onerror=closed.append):
        if CONFIG in names or RESULT in names:
            yield Path(where)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def read_entry(folder: Path) -> Entry:
    """A finished run, or a :class:`SmartpruneError` that says why it is none."""
    if not (folder / RESULT).exists():
        raise SmartpruneError(f"unfinished (no {RESULT})")
    result, config = (Fields(parse_json(read_limited(folder / name, LARGEST_FILE), name), name) for name in (RESULT, CONFIG))
    for name in ("task", "model", "method", "block"):
        config.text(name)
    for name in ("task_settings", "settings"):
        config.nested(name)
    config.integer("seed")
    config.number(asked(config.data)[0])
    if not result.boolean("verified"):
        raise SmartpruneError(f"{RESULT}: the model is not what its receipt says")
    for name in ("dense", "pruned"):
        if result.raw(name) is None:
            raise SmartpruneError(f"{RESULT}: {name} is not scored yet; score it with: smartprune eval {shlex.quote(str(folder))}")
    versions = result.nested("versions")
    return Entry(
        folder=folder,
        config=dict(config.data),
        metric=result.text("measure"),
        pruned=result.number("pruned"),
        dense=result.number("dense"),
        seconds=result.number("seconds"),
        versions={name: versions.text(name) for name in versions.data},
        macs_left=_macs_left(folder / RECEIPT),
    )


def _macs_left(path: Path) -> float | None:
    """As a share of the MACs of the pruned layers; None where there is no receipt, or none that counted them."""
    if not path.exists():
        return None
    try:
        receipt = Fields(parse_json(read_limited(path, LARGEST_RECEIPT), RECEIPT), RECEIPT)
        macs = receipt.nested("achieved").nested("macs")
        total = macs.integer("total", 1)
        return macs.integer("kept", 0, total) / total
    except SmartpruneError:
        return None


def key(config: Mapping[str, Any]) -> Key:
    """What a run is, apart from where and how fast it was made."""
    method = method_name(config["method"], config["settings"])
    return _data(config), config["model"], config["block"], protocol(config), method, asked(config), config["seed"]


def row_keys(row: Mapping[str, Any], where: str) -> list[Key]:
    """The runs in a row that :meth:`Row.to_json` made; none in a row that is not of training runs."""
    if "seeds" not in row:
        return []
    told = Fields(dict(row), where)
    data, model, block, line, method = (told.text(name, LONGEST) for name in ("data", "model", "block", "protocol", "method"))
    method = method_name(method.partition("(")[0], told.nested("settings").data)
    kind = next((name for name in BUDGETS if row.get(name) is not None), BUDGETS[0])
    seeds = told.integers("seeds", 0, MOST_SEEDS)
    if len(seeds) != row["n"]:
        raise told.error("seeds", f"a list of {row['n']} integers, one for each of the values")
    return [(data, model, block, line, method, (kind, told.number(kind)), seed) for seed in seeds]


def _data(config: Mapping[str, Any]) -> str:
    kept = {name: value for name, value in config["task_settings"].items() if name != "folder"}
    return named(config["task"], TASKS, kept)


def protocol(config: Mapping[str, Any]) -> str:
    """How a run was trained, in a line; two runs with the same line were trained alike.

    >>> protocol({"dense_epochs": 30, "search_epochs": 40, "finetune_epochs": 30, "batch": 64, "floor": None})
    '30 dense + 40 search + 30 fine-tuning epochs, batch 64'
    """
    rest = {name: value for name, value in config.items() if name not in (*APART, *ASIDE)}
    epochs = [rest.pop(name, "?") for name in ("dense_epochs", "search_epochs", "finetune_epochs")]
    parts = ["{} dense + {} search + {} fine-tuning epochs".format(*epochs)]
    if config.get("cycles") is None:
        rest.pop("npu", None)
    elif isinstance(rest.get("npu"), str):
        rest["npu"] = os.path.basename(rest["npu"])  # the file of one by its name, wherever it lies
    if "poly" not in (rest.get("schedule"), rest.get("search_schedule")):
        rest.pop("poly_power", None)
    idle = {name for name, value in NEUTRAL.items() if name in rest and rest[name] == value}
    idle |= {name for name, other in GOES_WITH.items() if other in idle}
    for name, value in rest.items():
        if name in idle or value in (None, "", [], ()):
            continue
        shown = " ".join(value) if isinstance(value, (list, tuple)) else plain(value)
        parts.append(shown if name == "optimizer" else f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
