"""The cells of a sweep: methods x sparsities x seeds, each with its settings, its name and the dense model it needs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...errors import SmartpruneError
from ...files import parse_json, read_limited
from ...training.config import BUDGET_SETTINGS, DEFAULTS, Config, configure

MAX_FILE_BYTES = 1 << 20
# settings that do not change the dense stage; a setting that is not listed here may change it
AFTER_DENSE = (
    "method", "settings", "block", *BUDGET_SETTINGS, "npu", "cost_table", "onnx", "floor", "include", "skip", "dense",
    "search_epochs", "finetune_epochs", "search_lr", "finetune_lr", "score_lr", "score_decay", "search_schedule",
    "schedule_over", "distill", "distill_temperature", "tensorboard", "track", "checkpoint_seconds", "out",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every method at every sparsity with every seed. A sparsity of None leaves it to the task, or to ``macs``.

    ``label`` becomes part of the names of the cells, so that grids with different options can share a folder. With a
    ``dense_seed``, all seeds start from the dense model of that seed; without it, each starts from its own.
    """

    label: str | None = None
    methods: tuple[str, ...]
    sparsities: tuple[float | None, ...] = (None,)
    seeds: tuple[int, ...] = (0,)
    dense_seed: int | None = None
    options: Mapping[str, Any]
    settings: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        if self.label is not None and not (isinstance(self.label, str) and re.fullmatch(r"[A-Za-z0-9_-]+", self.label)):
            raise SmartpruneError(f"label {self.label!r} must be a word of letters, digits, - and _, such as short")
        if self.dense_seed is None:
            return
        if type(self.dense_seed) is not int or not 0 <= self.dense_seed < 2**32:
            raise SmartpruneError(f"dense_seed {self.dense_seed!r} must be an integer from 0 to 2**32 - 1")
        if self.options.get("dense"):
            raise SmartpruneError(f"dense_seed {self.dense_seed} and dense {self.options['dense']!r}: give only one of them")

    def override(self, options: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> Grid:
        """The same grid with these options and settings, which take precedence over its own."""
        merged = {name: {**self.settings.get(name, {}), **settings.get(name, {})} for name in {*self.settings, *settings}}
        merged_options, task_settings = {**self.options, **options}, self.options.get("task_settings")
        same_task = merged_options.get("task") == self.options.get("task")
        if isinstance(task_settings, dict) and "task_settings" in options and same_task:
            merged_options["task_settings"] = {**task_settings, **options["task_settings"]}
        return replace(self, options=merged_options, settings=merged)


@dataclass(frozen=True)
class Cell:
    """One run of the sweep. ``dense`` is the name of the dense model that it starts from; None where a file was given."""

    name: str
    config: Config
    dense: str | None
    dense_seed: int

    def folder(self, out: Path) -> Path:
        return out / self.name

    def dense_config(self, out: Path) -> Config:
        """The settings of the run that trains its dense model."""
        return dense_config(replace(self.config, seed=self.dense_seed), out)


def expand_grids(grids: Sequence[Grid]) -> list[Cell]:
    """The cells in the order in which they are run: by method, then sparsity, then seed."""
    cells: dict[str, Cell] = {}
    methods = list(dict.fromkeys(method for grid in grids for method in grid.methods))
    for unused in (name for grid in grids for name in grid.settings if name not in methods):
        raise SmartpruneError(f"settings for {unused}, which is not one of the methods: {', '.join(methods)}")
    for grid in grids:
        for method in grid.methods:
            for sparsity in grid.sparsities:
                for seed in grid.seeds:
                    cell = _cell(grid, method, sparsity, seed)
                    if cells.setdefault(cell.name, cell) != cell:
                        raise SmartpruneError(f"{cell.name} is in two grids with different options; give each grid a label")
    return list(cells.values())


def _cell(grid: Grid, method: str, sparsity: float | None, seed: int) -> Cell:
    settings = dict(grid.settings.get(method, {}))
    values = {**grid.options, "method": method, "settings": settings, "seed": seed}
    if sparsity is not None:
        for kind in BUDGET_SETTINGS[1:]:
            if grid.options.get(kind) is not None:
                raise SmartpruneError(f"sparsities and {kind}: a run has one budget; give only one of them")
        values |= {**dict.fromkeys(BUDGET_SETTINGS), "sparsity": sparsity}
    if values.get("dense"):
        values["dense"] = str(values["dense"]).replace("{seed}", str(seed))
    config = configure({"onnx": "off", **values})
    kind, number = config.budget_share
    share = f"{kind if kind != 'sparsity' else ''}{number:g}"
    special = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in settings.items()]
    label = [grid.label] if grid.label is not None else []
    parts = [config.task, config.model, *label, method, *special, config.block.replace("*", "all"), share, f"s{seed}"]
    name = safe_name("-".join(parts))
    dense_seed = seed if grid.dense_seed is None else grid.dense_seed
    return Cell(name, config, None if config.dense else dense_name(replace(config, seed=dense_seed)), dense_seed)


def safe_name(text: str) -> str:
    """The text with every character replaced that may not be in the name of a file or folder."""
    return re.sub(r"[^\w.=+-]", "_", text)


def dense_name(config: Config) -> str:
    """The name of a dense model, such as ``digits-resnet8-s0-1f0c22ab``; the hash covers all settings of the dense stage."""
    digest = hashlib.sha256(json.dumps(dense_settings(config), sort_keys=True).encode()).hexdigest()[:8]
    return safe_name(f"{config.task}-{config.model}-s{config.seed}-{digest}")


def dense_settings(config: Config) -> dict[str, Any]:
    """The settings that may change the dense stage."""
    later = AFTER_DENSE + ("augment", "augment_over") * (config.augment == 0 or config.augment_over != "all")
    return {name: value for name, value in asdict(config).items() if name not in later}


def dense_config(config: Config, out: Path) -> Config:
    """A run with the same dense stage as ``config`` and with the shortest possible stages after it."""
    epochs = int(config.warmup_epochs) + 1  # a schedule must be longer than its warm-up
    shortest = {"method": "magnitude", "sparsity": 0.5, "search_epochs": epochs, "finetune_epochs": epochs}
    return configure({**dense_settings(config), **shortest, "out": str(out)})


def read_grids(path: Path) -> list[Grid]:
    """Grids from a JSON file that holds one object, or a list of objects that are run one after the other."""
    data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path))
    if data == []:
        raise SmartpruneError(f"{path} holds no grid; a grid is an object with methods, sparsities, seeds")
    if isinstance(data, list):
        return [_read_grid(item, f"{path}: [{number}]") for number, item in enumerate(data)]
    return [_read_grid(data, str(path))]


def _read_grid(item: object, where: str) -> Grid:
    if not isinstance(item, dict):
        raise SmartpruneError(f"{where} is of type {type(item).__name__}; a grid is an object with methods, sparsities, seeds")
    known = [f.name for f in fields(Grid)]
    for name in item:
        if name not in known:
            raise SmartpruneError(f"{where}: unknown key {name!r}; a grid has: {', '.join(known)}")
    defaults: dict[str, list[Any]] = {"methods": [DEFAULTS["method"]], "sparsities": [None], "seeds": [0]}
    lists = {name: item.get(name, default) for name, default in defaults.items()}
    for name, value in lists.items():
        if not isinstance(value, list) or not value:
            raise SmartpruneError(f"{where}: {name} is {value!r}; it must be a list with at least one entry")
    for method in lists["methods"]:
        if not isinstance(method, str):
            raise SmartpruneError(f"{where}: methods has {method!r}; it must be a list of names")
    options, settings = item.get("options", {}), item.get("settings", {})
    if not isinstance(options, dict) or not isinstance(settings, dict):
        raise SmartpruneError(f"{where}: options and settings must be objects")
    for name in ("method", "sparsity", "seed", "settings", "out"):
        if name in options:
            raise SmartpruneError(f"{where}: options has {name}; it belongs to the grid, not to its options")
    for method, values in settings.items():
        if not isinstance(values, dict):
            raise SmartpruneError(f"{where}: settings of {method} is {values!r}; it must be an object")
    arguments: dict[str, Any] = {name: tuple(value) for name, value in lists.items()}
    arguments |= {name: item[name] for name in ("label", "dense_seed") if name in item}
    try:
        return Grid(options=options, settings=settings, **arguments)
    except SmartpruneError as error:
        raise SmartpruneError(f"{where}: {error}") from None
