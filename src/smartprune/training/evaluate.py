"""Judging a model: the figures of a task on a split, and what the model found there where a task keeps that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SmartpruneError
from ..files import write_atomic
from ..tasks import Data, Task

Figures = dict[str, float | None]  # by name, the task's measure first; None: not scored


def judge(task: Task, model: nn.Module, split: str, device: torch.device) -> tuple[Figures, list[dict[str, Any]] | None]:
    """The model's figures, and what it found; a task that is judged at once finds nothing to keep.

    A task may need a package to be judged that is not installed here. Its measure is None then, and what was found can be
    scored later, by ``smartprune eval``.
    """
    data, training, own = _still(task, split, device), model.training, _deferred(task)
    model.eval()
    try:
        with torch.no_grad():
            if own is None:
                return {task.measure: task.metric(model, data)}, None
            found: list[dict[str, Any]] = own.predictions(model, data)
    finally:
        model.train(training)
    return own.score(found, split) or {task.measure: None}, found


def _still(task: Task, split: str, device: torch.device) -> Data:
    """A split to judge by. That to train on is shuffled and changed, and its last samples may be left out."""
    data: Any = task.data(split, device)
    if split == "train" and not hasattr(data, "still"):
        raise SmartpruneError(f"{type(task).__name__}: its training split cannot be had as it is; judge on test or validation")
    return data.still() if split == "train" else data  # type: ignore[no-any-return]


def _deferred(task: Any) -> Any:
    return task if hasattr(task, "predictions") else None


def write_found(path: Path, found: list[dict[str, Any]]) -> None:
    """One line per find, so that files can be looked at and compared."""
    lines = ",\n".join(json.dumps(find, allow_nan=False) for find in found)
    write_atomic(path, f"[\n{lines}\n]\n".encode())
