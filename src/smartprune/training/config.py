"""The settings of a training run: a flat dataclass that is stored as ``config.json`` and reproduces the run.

This module does not import torch at the top, so the command line shows its help without delay.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from ..budgets import BUDGETS, SPARSITY, budget_fields, budget_names
from ..errors import SmartpruneError
from ..files import parse_json, read_limited

if TYPE_CHECKING:
    from ..core.budget import Budget
    from ..methods import Method
    from ..tasks import Task

Setting = int | float | str | bool | None
DEFAULTS = {"task": "digits", "method": "smart"}


def option(text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A field that becomes a command-line flag. A field without a default is filled from the task's recipe."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run. :func:`configure` makes one from some of them."""

    task: str = option("task to train on", DEFAULTS["task"], flag=False)
    task_settings: dict[str, Setting] = option("settings of the task", flag=False)  # noqa: RUF009
    model: str = option("network: a built-in name, timm/NAME, torchvision/NAME, or MODULE:FUNCTION")
    method: str = option("pruning method", DEFAULTS["method"])
    settings: dict[str, Setting] = option("settings of the method", flag=False)  # noqa: RUF009
    block: str = option("block size, output x input channels, such as 8x4")
    sparsity: float | None = option("share of blocks to remove, in [0, 1)", None)
    macs: float | None = option("share of multiply-accumulates to remove, instead of --sparsity", None)
    cycles: float | None = option("share of the cycles on --npu to remove, instead of --sparsity", None)
    budget: str | None = option("any budget instead of --sparsity, such as params=0.9", None, metavar="KIND=SHARE")
    npu: str = option("NPU whose cycles are counted: a preset, or a .json file with its settings", "edge")
    cost_table: str | None = option(
        "costs for --budget costs=SHARE (.json or .csv), or measured times for latency=SHARE (.json)", None, metavar="FILE"
    )
    floor: float | None = option("smallest share of its blocks that each layer keeps", None)
    include: tuple[str, ...] = option("layers to prune although they are skipped by default (globs)", ())
    skip: tuple[str, ...] = option("layers not to prune (globs)", ())
    dense: str | None = option("trained dense model to start from (.safetensors); skips the dense stage", None, metavar="FILE")
    dense_epochs: int = option("epochs of dense training")
    search_epochs: int = option("epochs of the search")
    finetune_epochs: int = option("epochs of fine-tuning, with the mask fixed")
    batch: int = option("samples per batch, over all processes")
    accumulate: int = option("batches per optimizer step; their gradients are averaged")
    optimizer: str = option("sgd or adamw")
    lr: float = option("learning rate of the dense stage")
    search_lr: float = option("learning rate of the weights during the search")
    finetune_lr: float = option("learning rate of fine-tuning")
    score_lr: float = option("learning rate of the scores")
    schedule: str = option("learning-rate schedule of the dense stage and of fine-tuning: cosine, poly, linear or constant")
    search_schedule: str = option("learning-rate schedule of the search: cosine, poly, linear or constant")
    schedule_over: str = option("stage: one schedule per stage; pruning: a single --schedule over search and fine-tuning together")
    poly_power: float = option("exponent of the poly schedule")
    warmup_epochs: float = option("epochs of learning-rate warm-up at the start of every schedule; may be fractional")
    warmup_start: float = option("share of the learning rate at which the warm-up starts")
    momentum: float = option("Nesterov momentum of sgd")
    weight_decay: float = option("weight decay of the weights")
    score_decay: float = option("weight decay of the scores", 0.0)
    clip_norm: float = option("maximum norm of all weight gradients together; 0: no clipping")
    ema: float = option("decay of a moving average of the weights, which is evaluated and saved instead of them; 0: none")
    distill: float = option("weight of the distance to the dense model's outputs in the loss of search and fine-tuning", 0.0)
    distill_temperature: float = option("temperature of that distance", 4.0)
    augment: float = option("strength of extra augmentation (contrast, colors, a blank square); 0: off, 1: clearly visible", 0.0)
    augment_over: str = option("stages with --augment: search; pruning: fine-tuning too; all: the dense stage too", "search")
    seed: int = option("seed of the weights and of the data order", 0)
    device: str = option("auto, cpu or cuda", "auto")
    threads: int = option("CPU threads; 0: torch's default. Another number may change the last bits of the result")
    amp: str = option("bf16 (autocast), off, or auto: bf16 on a GPU")
    compile: str = option("torch.compile the model for training: on or off", "off")
    graph: str = option("run a step as one CUDA graph: on, off, or auto: where possible", "auto")
    deterministic: str = option("bit-identical runs on a GPU too, at some cost in speed: on or off (a CPU always is)", "off")
    parallel: str = option("training with several processes (torchrun): ddp, or fsdp, which also shards the weights", "ddp")
    sync_bn: str = option("batch-norm statistics over all processes (GPUs only): on or off", "off")
    tensorboard: str = option("write the metrics for TensorBoard as well: on or off", "off")
    track: str = option("send the metrics to mlflow or wandb as well, or to both: mlflow,wandb", "")
    checkpoint_seconds: float = option("seconds between checkpoints; 0 writes one after every step")
    onnx: str = option("write model.onnx at the end: on, off, or auto: if onnx and onnxruntime are installed", "auto")
    out: str = option("run folder", "", flag=False)

    @property
    def budget_share(self) -> tuple[str, float]:
        """The name of the budget and its share, such as ``("sparsity", 0.95)``."""
        return budget_share(vars(self))


OWN_SETTINGS = tuple(name for name in budget_names() if name in Config.__dataclass_fields__)  # budgets with a setting of their name
BUDGET_SETTINGS = (*OWN_SETTINGS, "budget")  # a run has exactly one of them


def budget_share(values: Mapping[str, Any]) -> tuple[str, float]:
    """The name of the budget and its share, from the settings of a run."""
    name = next((name for name in BUDGET_SETTINGS if values.get(name) is not None), None)
    if name == "budget":
        return parse_budget(values[name])
    return (SPARSITY, math.nan) if name is None else (name, float(values[name]))


def parse_budget(value: str) -> tuple[str, float]:
    """A budget written as ``KIND=SHARE``.

    >>> parse_budget("params=0.9"), parse_budget("blocks=0.9")
    (('params', 0.9), ('sparsity', 0.9))
    """
    kind, _, share = value.partition("=")
    try:
        return SPARSITY if kind == "blocks" else kind, float(share)
    except ValueError:
        raise SmartpruneError(f"budget={value!r} cannot be read; write KIND=SHARE, such as params=0.9") from None


def configure(settings: Mapping[str, Any]) -> Config:
    """Fills missing settings from the task's recipe and checks every value.

    >>> configure({"sparsity": 0.8}).block
    '16x8'
    """
    check_names(settings)
    task_name = _checked("task", settings.get("task", DEFAULTS["task"]))
    task = make_task(task_name, _checked("task_settings", settings.get("task_settings", {})))
    values: dict[str, Any] = {**asdict(task.recipe), "task": task_name, "task_settings": asdict(task)}  # type: ignore[call-overload]
    if any(settings.get(name) is not None for name in BUDGET_SETTINGS[1:]):
        values["sparsity"] = None
    values |= {name: value for name, value in settings.items() if name not in ("task", "task_settings")}
    method_name = _checked("method", values.get("method", DEFAULTS["method"]))
    method = make_method(method_name, _checked("settings", values.get("settings", {})))
    values |= {"method": method_name, "settings": asdict(method)}  # type: ignore[call-overload]
    for f in fields(Config):
        values[f.name] = _checked(f.name, values.get(f.name, f.default))
    config = Config(**values)
    _check(config, task)
    return config


def check_names(settings: Mapping[str, Any]) -> None:
    """Raises on settings that do not exist."""
    unknown = sorted(set(settings) - {f.name for f in fields(Config)})
    if unknown:
        raise SmartpruneError(
            f"unknown setting {unknown[0]!r}; the settings of a run are: {', '.join(f.name for f in fields(Config))}"
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The values in a ``config.json``, unchecked."""
    try:
        values = parse_json(read_limited(path, MAX_BYTES), str(path))
    except SmartpruneError as error:
        raise SmartpruneError(f"{path} cannot be read as a configuration: {error}") from None
    if not isinstance(values, dict):
        raise SmartpruneError(f"{path} holds a {type(values).__name__}; a configuration is a JSON object")
    return values


def load_config(path: str | Path) -> Config:
    """Reads and checks a ``config.json``."""
    values = read_config(path)
    try:
        return configure(values)
    except SmartpruneError as error:
        raise SmartpruneError(f"{path}: {error}") from None


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    from ..tasks import TASKS

    return _make(TASKS, "task", name, settings)  # type: ignore[no-any-return]


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    from ..methods import METHODS

    return _make(METHODS, "method", name, settings)  # type: ignore[no-any-return]


def make_budget(name: str, share: float, example: Any, npu: str, cost_table: str | None = None) -> Budget:
    """A budget by its name: ``sparsity`` or a kind. The other arguments are passed to budgets that have such a field."""
    from ..core.budget import as_share
    from ..hardware.npu import read_npu

    if name not in budget_names():
        raise SmartpruneError(f"unknown budget {name!r}; choose one of: {', '.join(BUDGETS)}")
    makers: dict[str, Callable[[], Any]] = {"example": lambda: example, "npu": lambda: read_npu(npu)}
    makers["table"] = lambda: None if cost_table is None else BUDGETS[name].read_table(cost_table)
    values = {field: make() for field, make in makers.items() if field in budget_fields(name)}
    budget: Budget = BUDGETS["blocks" if name == SPARSITY else name](as_share(share, name), **values)
    return budget


def _make(classes: Mapping[str, Any], kind: str, name: str, settings: Mapping[str, Any]) -> Any:
    """An instance of the dataclass of that name, after a check of the settings' names and types."""
    if name not in classes:
        raise SmartpruneError(f"unknown {kind} {name!r}; choose one of: {', '.join(classes)}")
    hints = _hints(classes[name])
    known = {f.name: hints[f.name] for f in fields(classes[name])}
    for setting, value in settings.items():
        if setting == "folder" and kind == "task" and setting not in known:  # the setting behind --data
            raise SmartpruneError(f"the task {name} includes its data and reads no folder; remove --data {value}")
        if setting not in known:
            raise SmartpruneError(f"unknown setting {setting!r} for {name}; its settings are: {', '.join(known) or 'none'}")
        if not _matches(value, known[setting]):
            raise SmartpruneError(f"{name}: {setting}={value!r} must be {_type_name(known[setting])}")
    return classes[name](**settings)


def accepts(record: type, setting: str, value: object) -> bool:
    """Whether a task or a method has this setting and the value has its type."""
    return setting in {f.name for f in fields(record)} and _matches(value, _hints(record)[setting])


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _checked(name: str, value: Any) -> Any:
    """The value, if it has the type of that field of Config. A list, as JSON has them, is accepted for a tuple."""
    hint = _hints(Config)[name]
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        value = tuple(value)
    if not _matches(value, hint):
        raise SmartpruneError(f"{name}={value!r} must be {_type_name(hint)}")
    return value


def _matches(value: Any, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is types.UnionType or type(hint).__name__ in ("_UnionGenericAlias", "Union"):
        return any(_matches(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) and _matches(v, args[1]) for key, v in value.items())
    if get_origin(hint) is not None and type(hint).__name__ == "_LiteralGenericAlias":
        return value in args
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
    return type(value) is hint or (hint is type(None) and value is None)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def _type_name(hint: Any) -> str:
    if type(hint).__name__ == "_LiteralGenericAlias":
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return str(getattr(hint, "__name__", None) or hint) if not get_args(hint) else str(hint)


POSITIVE = (
    "search_epochs", "finetune_epochs", "batch", "accumulate", "lr", "search_lr", "finetune_lr", "poly_power",
    "distill_temperature",
)  # fmt: skip
NOT_NEGATIVE = (
    "dense_epochs", "score_lr", "momentum", "weight_decay", "score_decay", "seed", "threads", "checkpoint_seconds", "warmup_epochs",
    "clip_norm", "distill", "augment",
)  # fmt: skip
SMALL = (
    "lr", "search_lr", "finetune_lr", "score_lr", "momentum", "weight_decay", "score_decay", "clip_norm", "distill",
    "distill_temperature",
)  # fmt: skip
MAX_FLOAT32 = 2.0**128 - 2.0**104
MAX_THREADS = 4096
MAX_BYTES = 1 << 20  # of a configuration
SCHEDULES = ("cosine", "poly", "linear", "constant")
CHOICES = {
    "optimizer": ("sgd", "adamw"),
    "schedule": SCHEDULES,
    "search_schedule": SCHEDULES,
    "schedule_over": ("stage", "pruning"),
    "augment_over": ("search", "pruning", "all"),
    "amp": ("auto", "bf16", "off"),
    "compile": ("on", "off"),
    "graph": ("auto", "on", "off"),
    "onnx": ("auto", "on", "off"),
    "device": ("auto", "cpu", "cuda"),
    "deterministic": ("on", "off"),
    "parallel": ("ddp", "fsdp"),
    "sync_bn": ("on", "off"),
    "tensorboard": ("on", "off"),
}


def _check(config: Config, task: Task) -> None:
    from ..core.block import Block
    from ..core.budget import as_share
    from ..hardware.npu import read_npu
    from ..models.named import OTHER_NAMES, is_external
    from ..tasks.augment import STRONGEST

    for name in POSITIVE:
        if getattr(config, name) <= 0:
            raise SmartpruneError(f"{name}={getattr(config, name)} must be above 0")
    for name in NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise SmartpruneError(f"{name}={getattr(config, name)} must not be negative")
    for name in SMALL:
        if getattr(config, name) > MAX_FLOAT32:
            raise SmartpruneError(f"{name}={getattr(config, name):g} must be at most {MAX_FLOAT32:.2g}, the largest float32")
    if config.threads > MAX_THREADS:
        raise SmartpruneError(f"threads={config.threads} must be at most {MAX_THREADS}")
    for name, allowed in CHOICES.items():
        if getattr(config, name) not in allowed:
            raise SmartpruneError(f"{name}={getattr(config, name)!r} must be one of {', '.join(allowed)}")
    if not 0 <= config.ema < 1:
        raise SmartpruneError(f"ema={config.ema} must be at least 0 and below 1, such as 0.999")
    if config.augment > STRONGEST:
        raise SmartpruneError(f"augment={config.augment:g} must be from 0 to {STRONGEST:g}")
    if not 0 <= config.warmup_start <= 1:
        raise SmartpruneError(f"warmup_start={config.warmup_start} must be from 0 to 1")
    for name, epochs in _schedules(config).items():
        if config.warmup_epochs and config.warmup_epochs >= epochs > 0:
            raise SmartpruneError(f"warmup_epochs={config.warmup_epochs:g} must be shorter than the {name} ({epochs} epochs)")
    if config.seed >= 2**32:
        raise SmartpruneError(f"seed={config.seed} must be below 2**32")
    if sum(getattr(config, name) is not None for name in BUDGET_SETTINGS) != 1:
        given = [f"{name}={getattr(config, name)}" for name in BUDGET_SETTINGS if getattr(config, name) is not None]
        raise SmartpruneError(f"{' and '.join(given) or 'no budget'}: set exactly one of {', '.join(BUDGET_SETTINGS)}")
    name, share = config.budget_share
    if name not in budget_names():
        raise SmartpruneError(f"unknown budget {name!r}; choose one of: {', '.join(BUDGETS)}")
    as_share(share, name)
    if "npu" in budget_fields(name):
        read_npu(config.npu)
    if "table" in budget_fields(name, required=True) and config.cost_table is None:
        raise SmartpruneError(f"budget={name}: there is no table of costs; give cost_table (--cost-table), a .json or .csv file")
    if config.cost_table is not None and "table" not in budget_fields(name):
        raise SmartpruneError(
            f"cost_table={config.cost_table!r} is for budgets such as costs=SHARE, and the budget is {name}; leave it out"
        )
    if config.model not in task.models and not is_external(config.model):
        raise SmartpruneError(
            f"model={config.model!r} is unknown to the task {config.task}; its networks are: {', '.join(task.models)}; "
            f"or use {OTHER_NAMES}"
        )
    if config.floor is not None:
        as_share(config.floor, "floor", "the smallest share of its blocks that each layer keeps")
    Block.of(config.block)


def _schedules(config: Config) -> dict[str, int]:
    """The learning-rate schedules of a run and their lengths in epochs."""
    dense = {"dense stage": 0 if config.dense is not None else config.dense_epochs}
    if config.schedule_over == "pruning":
        return dense | {"search and fine-tuning": config.search_epochs + config.finetune_epochs}
    return dense | {"search": config.search_epochs, "fine-tuning": config.finetune_epochs}


def flags() -> list[Field[Any]]:
    """The fields of Config that are flags of the command line."""
    return [f for f in fields(Config) if f.metadata.get("flag", True)]


PLACES = {
    "out", "dense", "device", "threads", "parallel", "deterministic", "checkpoint_seconds", "tensorboard", "track", "onnx",
    "graph", "compile",
}  # fmt: skip


def training_settings(config: Config) -> dict[str, Any]:
    """The settings that a resumed run must keep: all but where it runs and where its files lie."""
    values = {name: value for name, value in asdict(config).items() if name not in PLACES}
    task = {name: value for name, value in config.task_settings.items() if name != "folder"}
    return {**values, "task_settings": task}


def changed_settings(saved: Mapping[str, Any], config: Config) -> list[str]:
    """What differs from the settings that a checkpoint was written with, as texts such as ``lr=0.2 (was 0.1)``."""
    return [
        f"{name}={value!r} (was {saved[name]!r})"
        for name, value in json.loads(json.dumps(training_settings(config))).items()
        if name in saved and saved[name] != value
    ]
