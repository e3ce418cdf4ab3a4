"""The page of a run folder: what the folder holds, and the cycles of its network on an NPU."""

from __future__ import annotations

from pathlib import Path

import torch

from . import config as configs
from .errors import SmartpruneError
from .models import foreign
from .npu import Estimate, read_npu
from .report.page import write_page
from .rundir import CONFIG

PAGE = "report.html"  # in a run folder


def write_run_page(folder: str | Path, path: str | Path | None = None, own: bool = False) -> None:
    """Writes ``report.html`` of a finished run, or the file ``path``. ``own``: the run is this process's."""
    folder = Path(folder)
    write_page(folder / PAGE if path is None else path, folder, estimate=run_cycles(folder, own=own))


def run_cycles(folder: str | Path, own: bool = False) -> Estimate | None:
    """The cycles of a run's network on the NPU of its settings, or None where it cannot be made here.

    A network that is somebody's function is only made where the run is our own: a folder from elsewhere must not choose what
    code runs.
    """
    try:
        config = configs.load(Path(folder) / CONFIG)
        if foreign(config.model) and not own:
            return None
        task = configs.make_task(config.task, config.task_settings)
        with torch.random.fork_rng(devices=[]):
            model = task.model(config.model)
        return read_npu(config.npu).estimate(model, task.example(), weights=folder)
    except SmartpruneError:
        return None
