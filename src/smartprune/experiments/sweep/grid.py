"""The cells of a sweep: methods x sparsities x seeds, each with its settings, its name, and the dense model it needs."""

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
from ...training.config import BUDGET_SETTINGS, Config, configure

LARGEST_FILE = 1 << 20
# settings that the dense stage does not depend on; what is not named here it may depend on
AFTER_DENSE = (
    "method", "settings", "block", *BUDGET_SETTINGS, "npu", "onnx", "floor", "include", "skip", "dense", "search_epochs",
    "finetune_epochs", "search_lr", "finetune_lr", "score_lr", "search_schedule", "schedule_over", "distill",
    "distill_temperature", "tensorboard", "checkpoint_seconds", "out",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every method at every sparsity with every seed. A sparsity of None leaves it to the task, or to ``macs``.

    ``label`` is part of the cells' names, so that grids with other options can stand beside this one. All seeds start
    from the dense model of ``dense_seed``; with None, each from its own.
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
            raise SmartpruneError(f"label {self.label!r} should be a word of letters, digits, - and _, such as short")
        if self.dense_seed is None:
            return
        if type(self.dense_seed) is not int or not 0 <= self.dense_seed < 2**32:
            raise SmartpruneError(f"dense_seed {self.dense_seed!r} should be an integer from 0 to 2**32 - 1")
        if self.options.get("dense"):
            raise SmartpruneError(f"dense_seed {self.dense_seed} and dense {self.options['dense']!r}: give one of the two")

    def under(self, options: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]) -> Grid:
        """The same, where these options and settings win."""
        merged = {name: {**self.settings.get(name, {}), **settings.get(name, {})} for name in {*self.settings, *settings}}
        both, own = {**self.options, **options}, self.options.get("task_settings")
        if isinstance(own, dict) and "task_settings" in options and both.get("task") == self.options.get("task"):
            both["task_settings"] = {**own, **options["task_settings"]}
        return replace(self, options=both, settings=merged)


@dataclass(frozen=True)
class Cell:
    """One run of the sweep. ``dense`` is the name of the dense model it starts from; None where one was given."""

    name: str
    config: Config
    dense: str | None
    dense_seed: int

    def folder(self, out: Path) -> Path:
        return out / self.name

    def dense_config(self, out: Path) -> Config:
        """The run that makes its dense model."""
        return dense_config(replace(self.config, seed=self.dense_seed), out)


def lay_out(grids: Sequence[Grid]) -> list[Cell]:
    """The cells in the order in which they are to be run: by method, then sparsity, then seed."""
    cells: dict[str, Cell] = {}
    methods = list(dict.fromkeys(method for grid in grids for method in grid.methods))
    for unused in (name for grid in grids for name in grid.settings if name not in methods):
        raise SmartpruneError(f"settings for {unused}, which is not among the methods: {', '.join(methods)}")
    for grid in grids:
        for method in grid.methods:
            for sparsity in grid.sparsities:
                for seed in grid.seeds:
                    cell = _cell(grid, method, sparsity, seed)
                    if cells.setdefault(cell.name, cell) != cell:
                        raise SmartpruneError(f"{cell.name} comes twice with different options; give each of the two grids a label")
    return list(cells.values())


def _cell(grid: Grid, method: str, sparsity: float | None, seed: int) -> Cell:
    own = dict(grid.settings.get(method, {}))
    given = {**grid.options, "method": method, "settings": own, "seed": seed}
    if sparsity is not None:
        for kind in BUDGET_SETTINGS[1:]:
            if grid.options.get(kind) is not None:
                raise SmartpruneError(f"sparsities and {kind}: a run has one budget; give one of the two")
        given |= {**dict.fromkeys(BUDGET_SETTINGS), "sparsity": sparsity}
    if given.get("dense"):
        given["dense"] = str(given["dense"]).replace("{seed}", str(seed))
    config = configure({"onnx": "off", **given})
    kind, number = config.asked
    share = f"{kind if kind != 'sparsity' else ''}{number:g}"
    special = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items()]
    label = [grid.label] if grid.label is not None else []
    parts = [config.task, config.model, *label, method, *special, config.block.replace("*", "all"), share, f"s{seed}"]
    name = plain_name("-".join(parts))
    dense_seed = seed if grid.dense_seed is None else grid.dense_seed
    return Cell(name, config, None if config.dense else dense_name(replace(config, seed=dense_seed)), dense_seed)


def plain_name(text: str) -> str:
    """A name that can be that of a file or a folder, whatever the model is called."""
    return re.sub(r"[^\w.=+-]", "_", text)


def dense_name(config: Config) -> str:
    """``digits-resnet8-s0-1f0c22ab``: a name for everything that a dense model depends on."""
    told = before_pruning(config)
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return plain_name(f"{config.task}-{config.model}-s{config.seed}-{digest}")


def before_pruning(config: Config) -> dict[str, Any]:
    """The settings that the dense stage may depend on."""
    later = AFTER_DENSE + ("augment", "augment_over") * (config.augment == 0 or config.augment_over != "all")
    return {name: value for name, value in asdict(config).items() if name not in later}


def dense_config(config: Config, out: Path) -> Config:
    """A run whose dense stage is that of ``config``; what follows it is as short and as simple as can be."""
    told = before_pruning(config)
    least = int(config.warmup_epochs) + 1  # a schedule is longer than its warm-up
    return configure(
        {**told, "method": "magnitude", "sparsity": 0.5, "search_epochs": least, "finetune_epochs": least, "out": str(out)}
    )


def read_grids(path: Path) -> list[Grid]:
    """Grids from a JSON file: an object, or a list of objects that are run one after the other."""
    data = parse_json(read_limited(path, LARGEST_FILE), str(path))
    if data == []:
        raise SmartpruneError(f"{path} holds no grid; a grid is an object with methods, sparsities, seeds")
    out = []
    for number, item in enumerate(data if isinstance(data, list) else [data]):
        where = f"{path}: [{number}]" if isinstance(data, list) else str(path)
        if not isinstance(item, dict):
            raise SmartpruneError(f"{where} is a {type(item).__name__}; a grid is an object with methods, sparsities, seeds")
        known = [f.name for f in fields(Grid)]
        for name in item:
            if name not in known:
                raise SmartpruneError(f"{where}: unknown key {name!r}; a grid has: {', '.join(known)}")
        lists = {name: item.get(name, usual) for name, usual in (("methods", ["smart"]), ("sparsities", [None]), ("seeds", [0]))}
        for name, value in lists.items():
            if not isinstance(value, list) or not value:
                raise SmartpruneError(f"{where}: {name} is {value!r}; it must be a list with something in it")
        for method in lists["methods"]:
            if not isinstance(method, str):
                raise SmartpruneError(f"{where}: methods has {method!r}; it must be a list of names")
        options, settings = item.get("options", {}), item.get("settings", {})
        if not isinstance(options, dict) or not isinstance(settings, dict):
            raise SmartpruneError(f"{where}: options and settings must be objects")
        for name in ("method", "sparsity", "seed", "settings", "out"):
            if name in options:
                raise SmartpruneError(f"{where}: options has {name}; a grid names it outside of them")
        for method, own in settings.items():
            if not isinstance(own, dict):
                raise SmartpruneError(f"{where}: settings of {method} is {own!r}; it must be an object")
        told: dict[str, Any] = {name: tuple(value) for name, value in lists.items()}
        told |= {name: item[name] for name in ("label", "dense_seed") if name in item}
        try:
            out.append(Grid(options=options, settings=settings, **told))
        except SmartpruneError as error:
            raise SmartpruneError(f"{where}: {error}") from None
    return out
