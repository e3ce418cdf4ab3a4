"""Finds and reads the folders of finished runs."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SmartpruneError
from ...fields import Fields
from ...files import parse_json, read_limited
from ...run_files import CONFIG, RECEIPT, RESULT
from ...training.config import budget_share
from .identity import protocol
from .labels import method_label, task_label

MAX_FILE_BYTES, MAX_RECEIPT_BYTES = 1 << 20, 1 << 26
Group = tuple[str, str, str, str, str]  # task, model, block, protocol, metric


@dataclass(frozen=True)
class FinishedRun:
    """The settings of a run, and the metric on the test split before and after pruning.

    ``blocks_removed`` is the sparsity in the receipt, and ``macs_left`` the share of the MACs of the pruned layers that is left;
    both are None without a receipt.
    """

    folder: Path
    config: dict[str, Any]
    metric: str
    pruned: float
    dense: float
    seconds: float
    versions: dict[str, str]
    finished: str = ""  # date and time, if the run recorded it
    macs_left: float | None = None
    blocks_removed: float | None = None

    @property
    def data(self) -> str:
        """The task, with the settings that are not its defaults."""
        return task_label(self.config)

    @property
    def method(self) -> str:
        """The method, with the settings that are not its defaults."""
        return method_label(self.config["method"], self.config["settings"])

    @property
    def group(self) -> Group:
        return self.data, self.config["model"], self.config["block"], protocol(self.config), self.metric

    @property
    def share(self) -> tuple[str, float]:
        """The budget: ``("sparsity", 0.9)`` or ``("macs", 0.5)``."""
        return budget_share(self.config)


def find_run_folders(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str | None]]:
    """Every run folder below the paths and globs, once; or a path with the reason why there is none."""
    seen: set[Path] = set()
    for path in map(str, paths):
        places = [Path(path)] if Path(path).exists() else [Path(match) for match in sorted(glob.glob(path))]
        if not places:
            yield Path(path), "no such folder"
        for place in places:
            errors: list[OSError] = []
            folders = list(_run_folders_below(place, errors)) if place.is_dir() else []
            for error in errors:
                yield Path(error.filename), f"cannot be read ({error.strerror}); make it readable"
            if not folders and not errors:
                yield place, f"not a run folder (no {CONFIG})" if place.is_dir() else "is a file; give the run folder"
            for folder in folders:
                if folder.resolve() not in seen:
                    seen.add(folder.resolve())
                    yield folder, None


def _run_folders_below(place: Path, errors: list[OSError]) -> Iterator[Path]:
    """The run folders in a folder. Errors of folders that cannot be read are added to ``errors``."""
    for folder, subfolders, files in os.walk(place, onerror=errors.append):
        if CONFIG in files or RESULT in files:
            yield Path(folder)
            subfolders.clear()
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))


def read_run(folder: Path) -> FinishedRun:
    """Reads a run folder; raises a :class:`SmartpruneError` with the reason where the run is not finished or is damaged."""
    if not (folder / RESULT).exists():
        raise SmartpruneError(f"unfinished (no {RESULT})")
    result, config = (Fields(parse_json(read_limited(folder / name, MAX_FILE_BYTES), name), name) for name in (RESULT, CONFIG))
    for name in ("task", "model", "method", "block"):
        config.text(name)
    for name in ("task_settings", "settings"):
        config.nested(name)
    config.integer("seed")
    name, _ = budget_share(config.data)
    if config.data.get("budget") is None:
        config.number(name)
    if not result.boolean("verified"):
        raise SmartpruneError(f"{RESULT}: the model does not match its receipt")
    for name in ("dense", "pruned"):
        if result.raw(name) is None:
            raise SmartpruneError(f"{RESULT}: {name} is not scored yet; score it with: smartprune eval {shlex.quote(str(folder))}")
    versions = result.nested("versions")
    return FinishedRun(
        folder=folder,
        config=dict(config.data),
        metric=result.text("measure"),
        pruned=result.number("pruned"),
        dense=result.number("dense"),
        seconds=result.number("seconds"),
        versions={name: versions.text(name) for name in versions.data},
        finished=finished if isinstance(finished := result.data.get("finished"), str) else "",
        macs_left=None if (macs := _achieved(folder / RECEIPT, "macs")) is None else macs[1] / macs[0],
        blocks_removed=None if (blocks := _achieved(folder / RECEIPT, "blocks")) is None else (blocks[0] - blocks[1]) / blocks[0],
    )


def _achieved(path: Path, name: str) -> tuple[int, int] | None:
    """The blocks or the MACs of the pruned layers: how many, and how many are kept. None without a receipt that counts them."""
    if not path.exists():
        return None
    try:
        receipt = Fields(parse_json(read_limited(path, MAX_RECEIPT_BYTES), RECEIPT), RECEIPT)
        count = receipt.nested("achieved").nested(name)
        total = count.integer("total", 1)
        return total, count.integer("kept", 0, total)
    except SmartpruneError:
        return None
