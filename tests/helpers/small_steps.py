"""Runs that tests take step by step, on a task without batch norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import plain_task
from smartprune.tasks import TASKS
from smartprune.training.check import resolve
from smartprune.training.config import Config, configure
from smartprune.training.folder import create_folder
from smartprune.training.run import Run, start_run

TASK = next(name for name, task in TASKS.items() if task is plain_task.PlainTask)


def plain_config(out: Path, **changes: Any) -> Config:
    given = {"dense_epochs": 1, "search_epochs": 2, "finetune_epochs": 1, "batch": 128, "sparsity": 0.5}
    return configure({"task": TASK, **given, "out": str(out), **changes})


def new_run(config: Config) -> Run:
    """A run at its beginning."""
    create_folder(config)
    return start_run(Path(config.out), resolve(config))
