"""The page of a run folder: what the folder holds, and the cycles of its network on an NPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..artifacts.source import read_source
from ..errors import SmartpruneError
from ..hardware.estimate import Estimate
from ..hardware.npu import read_npu
from ..models import is_external
from ..reports.page import write_page
from ..run_files import CONFIG, PAGE
from . import config as configs
from .config import Config


def write_run_page(folder: str | Path, path: str | Path | None = None, own: bool = False) -> None:
    """Writes ``report.html`` of a finished run, or the file ``path``. ``own``: the run is this process's."""
    folder = Path(folder)
    found = run_cycles(folder, own=own)
    write_page(folder / PAGE if path is None else path, folder, estimate=found, network=run_network(folder, own=own))


def run_cycles(folder: str | Path, own: bool = False) -> Estimate | None:
    """The cycles of a run's network on the NPU of its settings, or None where it cannot be made here."""
    try:
        config, model, example = _made(folder, own)
        return read_npu(config.npu).estimate(model, example, weights=folder)
    except SmartpruneError:
        return None


def run_network(folder: str | Path, own: bool = False) -> nn.Module | None:
    """A run's network, which says what axes its weights have, or None where it cannot be made here."""
    try:
        return _made(folder, own)[1]
    except SmartpruneError:
        return None


def _made(folder: str | Path, own: bool) -> tuple[Config, nn.Module, Any]:
    """The network of a run and an input. A folder from elsewhere must choose neither what code runs nor how much memory is
    taken: its network has to be one of ours, without numbers in it, and to fit the weights beside it."""
    config = configs.load(Path(folder) / CONFIG)
    if is_external(config.model) and not own:
        raise SmartpruneError(f"model={config.model!r} is not of this package")
    task = configs.make_task(config.task, config.task_settings)
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if own else torch.device("meta"):
            model, example = task.model(config.model), task.example()
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise SmartpruneError(f"model={config.model!r} cannot be made with these settings ({error})") from None
    if not own:
        read_source(folder, model)
    return config, model, example
