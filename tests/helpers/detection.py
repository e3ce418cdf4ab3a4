"""Helpers for tests of detection: a small task, a perfect model, and a slow overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smartprune.tasks.coco_eval import evaluator
from smartprune.tasks.detection import Detection

CPU = torch.device("cpu")

NO_AUGMENTATION = {"mosaic": 0.0, "scale": 0.0, "shift": 0.0, "flip": False, "hue": 0.0, "saturation": 0.0, "brightness": 0.0}

needs_evaluator = pytest.mark.skipif(evaluator() is None, reason="neither faster-coco-eval nor pycocotools is installed")


def make_task(path: Path, **changes: Any) -> Detection:
    return Detection(**{"folder": str(path), "size": 64, **changes})


def slow_iou(a: list[float], b: list[float]) -> float:
    intersection = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection
    return intersection / union if union else 0.0


class Oracle(nn.Module):
    """Returns the true boxes of the split, in order."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data, self.done = data, 0

    def forward(self, images: Tensor) -> Tensor:
        labels = self.data.labels[self.done : self.done + len(images)]
        self.done += len(images)
        return labels  # type: ignore[no-any-return]

    def decode(self, labels: Tensor) -> Tensor:
        centers, sides = (labels[..., 1:3] + labels[..., 3:]) / 2, labels[..., 3:] - labels[..., 1:3]
        classes = (labels[..., :1] == torch.arange(3)).float()  # all zero for padding
        return torch.cat([centers, sides, torch.full_like(labels[..., :1], 0.9), classes], -1)
