"""Boxes: how they overlap, which of them are one find, and how a picture is fitted into a square. All corners in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOOK = 32  # finds between looks whether any are left: a look waits for the device


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes [..., 4] of corners x1, y1, x2, y2; a box of no size overlaps with none."""
    both = torch.minimum(a[..., 2:], b[..., 2:]).sub(torch.maximum(a[..., :2], b[..., :2])).clamp_(min=0).prod(-1)
    either = area(a) + area(b) - both
    return torch.where(either > 0, both / either, 0)


def area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(-1)


def corners(boxes: Tensor) -> Tensor:
    """x1, y1, x2, y2 of boxes [..., 4] given by centre, width and height."""
    half = boxes[..., 2:4] / 2
    return torch.cat([boxes[..., :2] - half, boxes[..., :2] + half], -1)


def centres(boxes: Tensor) -> Tensor:
    """Centre, width and height of boxes [..., 4] given by their corners."""
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)


def nms(boxes: Tensor, scores: Tensor, classes: Tensor, overlap: float, most: int) -> Tensor:
    """The finds of every picture: numbers [batch, most] of boxes, best first, and -1 where there are no more.

    Again and again the best box is taken, and those of its class that overlap with it by more than ``overlap`` go. All
    pictures of the batch [batch, n] take their turns together, so the device is kept busy. Scores of 0 or less count for
    nothing.
    """
    left, each = scores.clone(), torch.arange(len(scores), device=scores.device)
    out = torch.full((len(scores), most), -1, dtype=torch.int64, device=scores.device)
    for turn in range(most if scores.shape[1] else 0):
        if turn % LOOK == 0 and not bool((left > 0).any()):
            break
        score, best = left.max(1)
        out[:, turn] = torch.where(score > 0, best, -1)
        own = classes == classes[each, best][:, None]
        left[own & (iou(boxes, boxes[each, best][:, None]) > overlap)] = 0
        left[each, best] = 0  # also a box of no size, which does not overlap with itself
    return out


@dataclass(frozen=True)
class Fit:
    """Where a picture of width x height lies in a square of ``size`` pixels, its longer side filling it."""

    width: int
    height: int
    size: int

    @property
    def inner(self) -> tuple[int, int]:
        """Width and height in the square."""
        share = self.size / max(self.width, self.height)
        return max(1, math.floor(self.width * share + 0.5)), max(1, math.floor(self.height * share + 0.5))

    @property
    def start(self) -> tuple[int, int]:
        """Left and top in the square."""
        wide, high = self.inner
        return (self.size - wide) // 2, (self.size - high) // 2

    @property
    def scale(self) -> tuple[float, float]:
        wide, high = self.inner
        return wide / self.width, high / self.height


def moved(boxes: Tensor, scale: Tensor, start: Tensor) -> Tensor:
    """Corners of boxes [..., 4] after ``x * scale + start``, both [..., 2]."""
    return boxes * torch.cat([scale, scale], -1) + torch.cat([start, start], -1)
