"""Bounding boxes: overlap, non-maximum suppression, and letterboxing of images. Corners are in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHECK_INTERVAL = 32  # iterations between checks whether boxes are left; each check synchronizes with the device


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes [..., 4] with corners x1, y1, x2, y2; zero for boxes without area."""
    intersection = torch.minimum(a[..., 2:], b[..., 2:]).sub(torch.maximum(a[..., :2], b[..., :2])).clamp_(min=0).prod(-1)
    union = area(a) + area(b) - intersection
    return torch.where(union > 0, intersection / union, 0)


def area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def to_corners(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] with center, width and height to x1, y1, x2, y2."""
    half = boxes[..., 2:4] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def to_centers(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] with corners to center, width and height."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)


def nms(boxes: Tensor, scores: Tensor, classes: Tensor, overlap: float, limit: int) -> Tensor:
    """Non-maximum suppression per class: indices [batch, limit] of the remaining boxes, best first, padded with -1.

    Each iteration takes the best box of every image and removes boxes of its class that overlap with it by more than
    ``overlap``. All images of the batch [batch, n] are processed together, which keeps the device busy. Boxes with a score
    of zero or less are ignored.
    """
    remaining, images = scores.clone(), torch.arange(len(scores), device=scores.device)
    out = torch.full((len(scores), limit), -1, dtype=torch.int64, device=scores.device)
    for i in range(limit if scores.shape[1] else 0):
        if i % CHECK_INTERVAL == 0 and not bool((remaining > 0).any()):
            break
        score, best = remaining.max(1)
        out[:, i] = torch.where(score > 0, best, -1)
        same_class = classes == classes[images, best][:, None]
        remaining[same_class & (iou(boxes, boxes[images, best][:, None]) > overlap)] = 0
        remaining[images, best] = 0  # a box without area does not overlap with itself
    return out


@dataclass(frozen=True)
class Letterbox:
    """Position of an image of width x height in a square of ``size`` pixels, whose side is its longer side."""

    width: int
    height: int
    size: int

    @property
    def inner(self) -> tuple[int, int]:
        """Width and height of the image in the square."""
        ratio = self.size / max(self.width, self.height)
        return max(1, math.floor(self.width * ratio + 0.5)), max(1, math.floor(self.height * ratio + 0.5))

    @property
    def start(self) -> tuple[int, int]:
        """Left and top of the image in the square."""
        width, height = self.inner
        return (self.size - width) // 2, (self.size - height) // 2

    @property
    def scale(self) -> tuple[float, float]:
        width, height = self.inner
        return width / self.width, height / self.height


def transform_boxes(boxes: Tensor, scale: Tensor, start: Tensor) -> Tensor:
    """Corners of boxes [..., 4] after ``x * scale + start``; both are [..., 2]."""
    return boxes * torch.cat([scale, scale], -1) + torch.cat([start, start], -1)
