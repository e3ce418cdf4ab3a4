"""Evaluation: the metrics of a model on a split of its task and, for detectors, the detections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import SmartpruneError
from ..files import write_atomic
from ..tasks import Data, Task

Metrics = dict[str, float | None]  # by name, the task's measure first; None: not scored yet
Detections = list[dict[str, Any]]


class Evaluation(NamedTuple):
    """The metrics of a model, its detections where the task has detections, and the number of samples."""

    metrics: Metrics
    detections: Detections | None
    samples: int


def evaluate(task: Task, model: nn.Module, split: str, device: torch.device) -> Evaluation:
    """Evaluates the model on a split.

    Scoring detections may need a package that is not installed. The measure is then None, and ``smartprune eval`` can
    score the detections later.
    """
    data, training = _evaluation_data(task, split, device), model.training
    detector: Any = task if hasattr(task, "predictions") else None
    model.eval()
    try:
        with torch.no_grad():
            if detector is None:
                return Evaluation({task.measure: task.metric(model, data)}, None, data.steps(1))
            detections: Detections = detector.predictions(model, data)
    finally:
        model.train(training)
    return Evaluation(detector.score(detections, split) or {task.measure: None}, detections, data.steps(1))


def _evaluation_data(task: Task, split: str, device: torch.device) -> Data:
    """A split in order and without augmentation. The training split is shuffled and augmented, and may drop its last samples."""
    data: Any = task.data(split, device)
    if split == "train" and not hasattr(data, "still"):
        raise SmartpruneError(
            f"{type(task).__name__}: its training split has no still(), which gives the samples in order and without "
            "augmentation; evaluate on test or validation"
        )
    return data.still() if split == "train" else data  # type: ignore[no-any-return]


def write_detections(path: Path, detections: Detections) -> None:
    """Writes one detection per line, so that files can be read and compared."""
    lines = ",\n".join(json.dumps(detection, allow_nan=False) for detection in detections)
    write_atomic(path, f"[\n{lines}\n]\n".encode())
