"""The HTML report of a run folder, with the cycles of its network on an NPU."""

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
from .config import Config, load_config, make_task


def write_run_page(folder: str | Path, path: str | Path | None = None, trusted: bool = False) -> None:
    """Writes the report of a finished run to ``report.html``, or to ``path``. ``trusted``: this process made the run."""
    folder = Path(folder)
    estimate = run_cycles(folder, trusted=trusted)
    network = run_network(folder, trusted=trusted)
    write_page(folder / PAGE if path is None else path, folder, estimate=estimate, network=network)


def run_cycles(folder: str | Path, trusted: bool = False) -> Estimate | None:
    """The cycles of a run's network on the NPU of its settings, or None if the network cannot be built here."""
    try:
        config, model, example = _build(folder, trusted)
        return read_npu(config.npu).estimate(model, example, weights=folder)
    except SmartpruneError:
        return None


def run_network(folder: str | Path, trusted: bool = False) -> nn.Module | None:
    """A run's network, which gives the axes of its weights, or None if it cannot be built here."""
    try:
        return _build(folder, trusted)[1]
    except SmartpruneError:
        return None


def _build(folder: str | Path, trusted: bool) -> tuple[Config, nn.Module, Any]:
    """The settings of a run, its network and an example input.

    An untrusted folder must not choose which code runs or how much memory is used. Its network must be one of this
    package, is built without memory for its weights, and must fit the stored weights.
    """
    config = load_config(Path(folder) / CONFIG)
    if is_external(config.model) and not trusted:
        raise SmartpruneError(f"model={config.model!r} is not part of this package")
    task = make_task(config.task, config.task_settings)
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if trusted else torch.device("meta"):
            model, example = task.model(config.model), task.example()
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise SmartpruneError(f"model={config.model!r} cannot be built with these settings ({error})") from None
    if not trusted:
        read_source(folder, model)
    return config, model, example
