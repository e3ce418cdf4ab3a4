"""Settings of a training run: a flat record that prints, goes to ``config.json`` and repeats the run.

Nothing here imports torch at the top, so the command line can show its help at once.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from ..budgets import BUDGETS, SPARSITY, budget_fields, budget_names
from ..errors import SmartpruneError
from ..files import parse_json

if TYPE_CHECKING:
    from ..core.budget import Budget
    from ..methods import Method
    from ..tasks import Task

Setting = int | float | str | bool | None
BUDGET_SETTINGS = ("sparsity", "macs", "cycles", "budget")  # a run has one of them


def option(text: str, default: Any = MISSING, **more: Any) -> Any:
    """A field that becomes a flag of the same name; without a default, the task's recipe fills it."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. Made by :func:`configure`, kept as ``config.json``."""

    task: str = option("what to train on", "digits", flag=False)
    task_settings: dict[str, Setting] = option("settings of the task", flag=False)  # noqa: RUF009
    model: str = option("network: by name, timm/NAME, torchvision/NAME, or MODULE:FUNCTION of your own")
    method: str = option("pruning method, by name", "smart")
    settings: dict[str, Setting] = option("settings of the method", flag=False)  # noqa: RUF009
    block: str = option("block, output x input channels, such as 8x4")
    sparsity: float | None = option("share of blocks to remove, in [0, 1)", None)
    macs: float | None = option("share of multiply-accumulates to remove, in place of --sparsity", None)
    cycles: float | None = option("share of the cycles on --npu to remove, in place of --sparsity", None)
    budget: str | None = option("any budget in place of --sparsity, as KIND=SHARE, such as params=0.9", None)
    npu: str = option("NPU whose cycles are counted: a preset, or a .json file of its settings", "edge")
    floor: float | None = option("least share of its blocks that each layer keeps", None)
    include: tuple[str, ...] = option("layers to prune although they are left alone by default (globs)", ())
    skip: tuple[str, ...] = option("layers to leave alone (globs)", ())
    dense: str | None = option("start from this trained dense model (.safetensors) and leave out the dense stage", None)
    dense_epochs: int = option("epochs of dense training")
    search_epochs: int = option("epochs in which the method searches")
    finetune_epochs: int = option("epochs after the mask is fixed")
    batch: int = option("samples per batch, over all processes together")
    accumulate: int = option("batches per optimizer step: their gradients are averaged")
    optimizer: str = option("sgd or adamw")
    lr: float = option("learning rate of the dense stage")
    search_lr: float = option("learning rate of the weights in the search")
    finetune_lr: float = option("learning rate of the fine-tuning")
    score_lr: float = option("learning rate of the scores")
    schedule: str = option("learning rate over the dense stage and the fine-tuning: cosine, poly, linear or constant")
    search_schedule: str = option("learning rate over the search: cosine, poly, linear or constant")
    schedule_over: str = option(
        "stage: every stage has its own schedule; pruning: one --schedule over the search and the fine-tuning together"
    )
    poly_power: float = option("exponent of the poly schedule")
    warmup_epochs: float = option("epochs at the beginning of every schedule in which the learning rate rises; parts count")
    warmup_start: float = option("share of the learning rate at which such a rise begins")
    momentum: float = option("momentum of sgd, in Nesterov's form")
    weight_decay: float = option("weight decay of the weights (scores have none)")
    clip_norm: float = option("largest norm of the weights' gradients together; 0 does not clip")
    ema: float = option("decay of a running average of the weights, which is judged and kept in their place; 0: none")
    distill: float = option("weight of the distance to the dense model's outputs in the loss of search and fine-tuning", 0.0)
    distill_temperature: float = option("temperature at which these outputs are compared", 4.0)
    augment: float = option(
        "how strongly training pictures are changed: contrast, colours, a blank square; 0: not, 1: clearly", 0.0
    )
    augment_over: str = option(
        "stages in which --augment does it: search; pruning: fine-tuning too; all: dense stage too", "search"
    )
    seed: int = option("seed of the weights and of the data order", 0)
    device: str = option("auto, cpu or cuda", "auto")
    threads: int = option("CPU threads; 0 leaves it to torch. Another number may change the last bits of the result")
    amp: str = option("bf16 (autocast), off, or auto: bf16 on a GPU")
    compile: str = option("torch.compile the model in training: on or off", "off")
    graph: str = option("take a step as one CUDA graph: on, off, or auto: where it works", "auto")
    deterministic: str = option(
        "the same bits from run to run on a GPU too, at a price in speed: on or off (a CPU always is)", "off"
    )
    parallel: str = option("how several processes (torchrun) share the work: ddp, or fsdp, which also splits the weights", "ddp")
    sync_bn: str = option("batch norm over the samples of all processes (on GPUs): on or off", "off")
    tensorboard: str = option("write the metrics for TensorBoard as well: on or off", "off")
    checkpoint_seconds: float = option("seconds between checkpoints; 0 writes one after every step")
    onnx: str = option("write model.onnx at the end: on, off, or auto: where onnx and onnxruntime are installed", "auto")
    out: str = option("run folder", "", flag=False)

    @property
    def asked(self) -> tuple[str, float]:
        """The budget by its name, such as ``("sparsity", 0.95)``."""
        return asked(vars(self))


def asked(values: Mapping[str, Any]) -> tuple[str, float]:
    """The budget that a run was given, by its name."""
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


def configure(given: Mapping[str, Any]) -> Config:
    """Fills what was not given from the task's recipe, and checks every value.

    >>> configure({"sparsity": 0.8}).block
    '8x4'
    """
    require_known(given)
    task_name = _fitting("task", given.get("task", "digits"))
    task = make_task(task_name, _fitting("task_settings", given.get("task_settings", {})))
    values: dict[str, Any] = {**asdict(task.recipe), "task": task_name, "task_settings": asdict(task)}  # type: ignore[call-overload]
    if any(given.get(name) is not None for name in BUDGET_SETTINGS[1:]):
        values["sparsity"] = None
    values |= {name: value for name, value in given.items() if name not in ("task", "task_settings")}
    method_name = _fitting("method", values.get("method", "smart"))
    method = make_method(method_name, _fitting("settings", values.get("settings", {})))
    values |= {"method": method_name, "settings": asdict(method)}  # type: ignore[call-overload]
    for f in fields(Config):
        values[f.name] = _fitting(f.name, values.get(f.name, f.default))
    config = Config(**values)
    _check(config, task)
    return config


def require_known(given: Mapping[str, Any]) -> None:
    """Refuses settings that no run has."""
    unknown = sorted(set(given) - {f.name for f in fields(Config)})
    if unknown:
        raise SmartpruneError(f"unknown setting {unknown[0]!r}; a run has: {', '.join(f.name for f in fields(Config))}")


def read(path: str | Path) -> dict[str, Any]:
    """What a ``config.json`` says, as it stands there."""
    try:
        values = parse_json(Path(path).read_bytes(), str(path))
    except (OSError, SmartpruneError) as error:
        raise SmartpruneError(f"{path} cannot be read as a configuration: {error}") from None
    if not isinstance(values, dict):
        raise SmartpruneError(f"{path} holds a {type(values).__name__}; a configuration is a JSON object")
    return values


def load(path: str | Path) -> Config:
    """Reads a ``config.json``."""
    values = read(path)
    try:
        return configure(values)
    except SmartpruneError as error:
        raise SmartpruneError(f"{path}: {error}") from None


def make_task(name: str, settings: Mapping[str, Any]) -> Task:
    from ..tasks import TASKS

    return _filled(TASKS, "task", name, settings)  # type: ignore[no-any-return]


def make_budget(name: str, share: float, example: Any, npu: str) -> Budget:
    """A budget by its name, ``sparsity`` or a kind. ``example`` and ``npu`` go to the budgets that have such a field."""
    from ..core.budget import as_share
    from ..hardware.npu import read_npu

    if name not in budget_names():
        raise SmartpruneError(f"unknown budget {name!r}; there are: {', '.join(BUDGETS)}")
    options: dict[str, Callable[[], Any]] = {"example": lambda: example, "npu": lambda: read_npu(npu)}
    given = {field: make() for field, make in options.items() if field in budget_fields(name)}
    budget: Budget = BUDGETS["blocks" if name == SPARSITY else name](as_share(share, name), **given)
    return budget


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    from ..methods import METHODS

    return _filled(METHODS, "method", name, settings)  # type: ignore[no-any-return]


def _filled(choices: Mapping[str, Any], kind: str, name: str, settings: Mapping[str, Any]) -> Any:
    """One of the dictionary's dataclasses with these settings; names and types are checked against its fields."""
    if name not in choices:
        raise SmartpruneError(f"unknown {kind} {name!r}; there are: {', '.join(choices)}")
    hints = _hints(choices[name])
    known = {f.name: hints[f.name] for f in fields(choices[name])}
    for setting, value in settings.items():
        if setting == "folder" and kind == "task" and setting not in known:  # what --data is called in there
            raise SmartpruneError(f"{name} brings its data along and reads no folder; leave --data {value} out")
        if setting not in known:
            raise SmartpruneError(f"unknown setting {setting!r} for {name}; it has: {', '.join(known) or 'none'}")
        if not _fits(value, known[setting]):
            raise SmartpruneError(f"{name}: {setting}={value!r} should be {_named(known[setting])}")
    return choices[name](**settings)


def takes(record: type, setting: str, value: object) -> bool:
    """Whether a value is of the type of a task's or a method's setting."""
    return setting in {f.name for f in fields(record)} and _fits(value, _hints(record)[setting])


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _fitting(name: str, value: Any) -> Any:
    """The value of a field of Config, if it is of the field's type (a list from JSON may stand for a tuple)."""
    hint = _hints(Config)[name]
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        value = tuple(value)
    if not _fits(value, hint):
        raise SmartpruneError(f"{name}={value!r} should be {_named(hint)}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is types.UnionType or type(hint).__name__ in ("_UnionGenericAlias", "Union"):
        return any(_fits(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) and _fits(v, parts[1]) for key, v in value.items())
    if get_origin(hint) is not None and type(hint).__name__ == "_LiteralGenericAlias":
        return value in parts
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _finite(value)
    return type(value) is hint or (hint is type(None) and value is None)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def _named(hint: Any) -> str:
    if type(hint).__name__ == "_LiteralGenericAlias":
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return str(getattr(hint, "__name__", None) or hint) if not get_args(hint) else str(hint)


POSITIVE = (
    "search_epochs", "finetune_epochs", "batch", "accumulate", "lr", "search_lr", "finetune_lr", "poly_power",
    "distill_temperature",
)  # fmt: skip
NOT_NEGATIVE = (
    "dense_epochs", "score_lr", "momentum", "weight_decay", "seed", "threads", "checkpoint_seconds", "warmup_epochs", "clip_norm",
    "distill", "augment",
)  # fmt: skip
SMALL = ("lr", "search_lr", "finetune_lr", "score_lr", "momentum", "weight_decay", "clip_norm", "distill", "distill_temperature")
LARGEST = 2.0**128 - 2.0**104  # of the numbers that weights are made of, float32
MOST_THREADS = 4096
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
            raise SmartpruneError(f"{name}={getattr(config, name)} should be above 0")
    for name in NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise SmartpruneError(f"{name}={getattr(config, name)} should not be negative")
    for name in SMALL:
        if getattr(config, name) > LARGEST:
            raise SmartpruneError(f"{name}={getattr(config, name):g} should be {LARGEST:.2g} at most, the largest float32 there is")
    if config.threads > MOST_THREADS:
        raise SmartpruneError(f"threads={config.threads} should be {MOST_THREADS} at most")
    for name, allowed in CHOICES.items():
        if getattr(config, name) not in allowed:
            raise SmartpruneError(f"{name}={getattr(config, name)!r}; it is one of {', '.join(allowed)}")
    if not 0 <= config.ema < 1:
        raise SmartpruneError(f"ema={config.ema} should be at least 0 and below 1, such as 0.999")
    if config.augment > STRONGEST:
        raise SmartpruneError(f"augment={config.augment:g} should be 0 to {STRONGEST:g}")
    if not 0 <= config.warmup_start <= 1:
        raise SmartpruneError(f"warmup_start={config.warmup_start} should be 0 to 1")
    for name, epochs in _schedules(config).items():
        if config.warmup_epochs and config.warmup_epochs >= epochs > 0:
            raise SmartpruneError(
                f"warmup_epochs={config.warmup_epochs:g} should be shorter than the {name}, which has {epochs} epochs"
            )
    if config.seed >= 2**32:
        raise SmartpruneError(f"seed={config.seed} should be below 2**32")
    if sum(getattr(config, name) is not None for name in BUDGET_SETTINGS) != 1:
        given = ", ".join(f"{name}={getattr(config, name)}" for name in BUDGET_SETTINGS)
        raise SmartpruneError(f"{given}: give one of them")
    name, share = config.asked
    if name not in budget_names():
        raise SmartpruneError(f"unknown budget {name!r}; there are: {', '.join(BUDGETS)}")
    as_share(share, name)
    if "npu" in budget_fields(name):
        read_npu(config.npu)
    if config.model not in task.models and not is_external(config.model):
        raise SmartpruneError(
            f"model={config.model!r} does not fit {config.task}; it takes: {', '.join(task.models)}; or use {OTHER_NAMES}"
        )
    if config.floor is not None:
        as_share(config.floor, "floor", "the least share of its blocks that each layer keeps")
    Block.of(config.block)


def _schedules(config: Config) -> dict[str, int]:
    """What has a schedule of its own, and its epochs."""
    dense = {"dense stage": 0 if config.dense is not None else config.dense_epochs}
    if config.schedule_over == "pruning":
        return dense | {"search and fine-tuning": config.search_epochs + config.finetune_epochs}
    return dense | {"search": config.search_epochs, "fine-tuning": config.finetune_epochs}


def flags() -> list[Field[Any]]:
    """The fields of Config that are flags of the command line."""
    return [f for f in fields(Config) if f.metadata.get("flag", True)]
