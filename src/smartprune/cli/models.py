"""The models, weights and inputs that commands take: a run folder, a network by name, a file."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import meant
from .streams import print_message

if TYPE_CHECKING:
    from torch import nn

    from ..tasks.task import Task
    from ..training.config import Config

BATCHES, SAMPLES = 8, 32  # of the training data, for the range of activations


def find_model(name: str, data: str | None = None) -> tuple[nn.Module, str, Any]:
    """A model with its default block and its example input (None if unknown). ``data`` is the data folder of a task."""
    from ..models import MODELS, build, is_external
    from ..models.named import OTHER_NAMES
    from ..tasks import TASKS
    from ..training.config import make_task

    if name in TASKS:
        task = make_task(name, {"folder": data} if data else {})
        return task.model(task.recipe.model), task.recipe.block, task.example()
    if data:
        raise SmartpruneError(f"--data is for tasks, and {name} is not a task; the tasks are: {', '.join(TASKS)}")
    if name not in MODELS and not is_external(name):
        problem = f"{name} is a path, not the name of a model" if os.path.exists(name) else f"unknown model {name!r}"
        raise SmartpruneError(
            f"{problem}{meant(name, (*MODELS, *TASKS))}; choose one of: {', '.join(MODELS)}; a task: {', '.join(TASKS)}; "
            f"or use {OTHER_NAMES}"
        )
    return build(name), "16x8", None


def parse_input(text: str) -> Any:
    """A sample of zeros with the shape of --input, such as 3x32x32."""
    import torch

    try:
        shape = [int(size) for size in text.lower().split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1:
        raise SmartpruneError(f"--input {text} cannot be read; write the shape of one sample, such as 3x32x32")
    with explain_memory_errors(f"--input {text}"):
        return torch.zeros(1, *shape)


def load_run(folder: Path, trust: bool) -> tuple[nn.Module, Any, Any, Task, Config]:
    """The pruned model of a finished run, its example input, receipt, task and settings.

    Raises if the run names a function to import, unless ``trust`` is true.
    """
    from ..artifacts.receipt import Receipt
    from ..training.config import load_config, make_task
    from ..training.trust import check_trusted

    for name in (run_files.CONFIG, run_files.MODEL):
        if not (folder / name).is_file():
            stored = folder / run_files.MODEL
            instead = f", or the name of the network and --weights {stored}" if stored.is_file() else ""
            raise SmartpruneError(f"{folder} has no {name}; give the folder of a finished run{instead}")
    config = load_config(folder / run_files.CONFIG)
    check_trusted(config.model, folder / run_files.CONFIG, trust=trust, announce=print_message)
    task = make_task(config.task, config.task_settings)
    model = task.model(config.model)
    load_stored_weights(model, folder / run_files.MODEL)
    receipt = folder / run_files.RECEIPT
    return model, task.example(), Receipt.load(receipt) if os.path.lexists(receipt) else None, task, config


def load_stored_weights(model: nn.Module, path: str | Path) -> None:
    """Loads the weights of any supported file."""
    from ..artifacts.pack import load_into
    from ..artifacts.source import read_source

    source = read_source(path)
    same = source.tensors.keys() == model.state_dict().keys()  # a model may really have a submodule called "module"
    load_into(model, source.tensors if same else source.unwrapped, str(path))


def read_inputs(path: str, batch: int = SAMPLES) -> list[Any]:
    """Inputs of a model from --calibration, an .npy array whose first axis is the samples."""
    import torch

    from ..arrays import read_array

    array = read_array(path, "give the inputs of --calibration as np.save stores them")
    try:
        values = torch.from_numpy(array)
    except TypeError:
        raise SmartpruneError(f"--calibration {path} holds {array.dtype}; give numbers that torch knows, such as float32") from None
    if values.dim() < 2 or values.numel() == 0:
        raise SmartpruneError(f"--calibration {path} has the shape {list(values.shape)}; its first axis must be the samples")
    return list((values if values.dtype != torch.float64 else values.float()).split(batch))


class _InputRecorded(Exception):  # noqa: N818 (not an error: it ends a forward pass)
    pass


def training_inputs(task: Task, model: nn.Module, batch: int, seed: int, batches: int = BATCHES) -> list[Any]:
    """The inputs of the model in its first training batches.

    Only the task knows the structure of a batch, so a hook on the model records the inputs.
    """
    import torch

    recorded: list[Any] = []

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        recorded.append(inputs)
        raise _InputRecorded

    data = task.data("train", torch.device("cpu"))
    hook = model.register_forward_pre_hook(record)
    try:
        for values in islice(data.batches(batch, seed, 0), batches):
            try:
                task.loss(model, values)
            except _InputRecorded:
                continue
    finally:
        hook.remove()
    return recorded
