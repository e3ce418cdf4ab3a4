"""The loss of YOLOv5 (v6): assigns objects to cells, and compares boxes, objectness and classes.

Shapes depend only on the settings, and nothing synchronizes with the device, so a step can be captured in a CUDA graph.
Objects and pairs that do not count get the weight 0 instead of being filtered out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Gains = tuple[float, float, float]
GAINS: Gains = (0.05, 1.0, 0.5)  # weights of boxes, objectness (at 640 pixels) and classes (for 80 classes)
USUAL_SIZE, USUAL_COLUMNS, USUAL_CLASSES = 640, 80, 80  # side of images, and columns of their finest map
NOMINAL_BATCH = 64  # YOLOv5 sums the loss over a batch and accumulates up to this number of images; its rates assume that
BALANCE = (4.0, 1.0, 0.4)  # weights of the objectness on the fine, middle and coarse map
MAX_RATIO = 4.0  # anchors are assigned to boxes whose sides differ by less than this factor
REACH = 0.5  # in cells; neighbors closer to the center than this are assigned, too
NEIGHBORS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))  # subtracted offsets: the cell itself, left, up, right, down
EPS = 1e-7


def yolo_loss(maps: Sequence[Tensor], targets: Tensor, anchors: Tensor, size: int, gains: Gains = GAINS) -> Tensor:
    """The loss of raw maps [batch, anchors, rows, columns, 5 + classes], scaled to a batch of 64 images.

    ``targets`` [batch, n, 5] are class, center x, y, width and height in pixels, with class -1 for none. ``anchors``
    [maps, anchors, 2] are widths and heights in pixels. ``size`` is the width of the images.
    """
    total = targets.new_zeros(())
    for raw, map_anchors, balance in zip(maps, anchors, BALANCE, strict=True):
        total = total + map_loss(raw, targets, map_anchors, size, balance, gains)
    return total * (3 / len(maps)) * NOMINAL_BATCH


def map_loss(raw: Tensor, targets: Tensor, anchors: Tensor, size: int, balance: float, gains: Gains) -> Tensor:
    raw = _to_float(raw)
    classes, stride = raw.shape[-1] - 5, size / raw.shape[3]
    with torch.no_grad():
        cell, box, label, counts = assign(raw.shape, targets, anchors, stride)
        number = counts.sum().clamp(min=1)
    outputs = raw.flatten(1, 3).gather(1, cell.flatten(1)[..., None].expand(-1, -1, raw.shape[-1]))
    outputs = outputs.unflatten(1, cell.shape[1:])  # [batch, n, anchors, neighbors, 5 + classes]
    s = outputs[..., :4].sigmoid()
    predicted = torch.cat([2 * s[..., :2] - 0.5, (2 * s[..., 2:]).square() * (anchors / stride)[:, None]], -1)
    overlap = ciou(predicted, box)
    box_loss = torch.where(counts, 1 - overlap, 0).sum() / number
    with torch.no_grad():  # a cell with several objects gets the target of the best fit
        target = torch.zeros_like(raw[..., 4]).flatten(1)
        value = torch.where(counts, overlap.detach().clamp(min=0), 0).to(target.dtype)
        target.scatter_reduce_(1, cell.flatten(1), value.flatten(1), "amax")
    object_loss = F.binary_cross_entropy_with_logits(raw[..., 4].flatten(1), target)
    loss = gains[0] * box_loss + gains[1] * (size / USUAL_SIZE) ** 2 * balance * object_loss
    if classes > 1:
        truth = (label[..., None] == torch.arange(classes, device=raw.device)).to(raw.dtype)
        logits = outputs[..., 5:]
        class_loss = F.binary_cross_entropy_with_logits(logits, truth.expand_as(logits), reduction="none").mean(-1)
        loss = loss + gains[2] * classes / USUAL_CLASSES * torch.where(counts, class_loss, 0).sum() / number
    return loss


def yolo_distance(maps: Sequence[Tensor], target: Sequence[Tensor], temperature: float) -> Tensor:
    """The distance of raw maps from the maps of a teacher, on the scale of the loss; 0 if they are equal.

    Objectness counts in all cells. Boxes and classes are weighted by the objectness of the teacher, because its outputs for
    empty cells are noise (Mehta and Ozturk 2018). The temperature applies to objectness and classes.
    """
    total = torch.zeros((), device=maps[0].device)
    size_factor = (maps[0].shape[3] / USUAL_COLUMNS) ** 2  # as in the loss: (size / 640)^2
    for raw, teacher, balance in zip(map(_to_float, maps), map(_to_float, target), BALANCE, strict=True):
        weight = teacher[..., 4].sigmoid()
        divergence = _binary_kl(raw[..., 4:] / temperature, teacher[..., 4:] / temperature)  # [..., objectness and classes]
        divergence = temperature**2 * divergence
        boxes = (raw[..., :4].sigmoid() - teacher[..., :4].sigmoid()).square().sum(-1)
        weighted = GAINS[0] * boxes
        if raw.shape[-1] > 6:
            weighted = weighted + GAINS[2] / USUAL_CLASSES * divergence[..., 1:].sum(-1)
        total = total + (weight * weighted).sum() / weight.sum().clamp(min=EPS)
        total = total + GAINS[1] * size_factor * balance * divergence[..., 0].mean()
    return total * (3 / len(maps)) * NOMINAL_BATCH


def _binary_kl(logits: Tensor, target: Tensor) -> Tensor:
    """``KL(sigmoid(target), sigmoid(logits))`` of each element."""
    probability = target.sigmoid()
    cross_entropy, entropy = (F.binary_cross_entropy_with_logits(x, probability, reduction="none") for x in (logits, target))
    return cross_entropy - entropy


def _to_float(raw: Tensor) -> Tensor:
    return raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw


def assign(shape: torch.Size, targets: Tensor, anchors: Tensor, stride: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cell, box, class and validity of every object, anchor and neighbor [batch, n, anchors, neighbors].

    The cell is its flat index in the map. The box [..., 4] is in cells, relative to that cell.
    """
    _, count, rows, columns, _ = shape
    offsets, sides = _constants(targets.device, targets.dtype, columns, rows)
    label, xy, wh = targets[..., 0], targets[..., 1:3] / stride, targets[..., 3:5] / stride  # in cells
    ratio = wh[:, :, None] / (anchors / stride)
    similar = torch.maximum(ratio, 1 / ratio).amax(-1) < MAX_RATIO  # [batch, n, anchors]
    from_end = sides - xy
    before, after = (xy % 1 < REACH) & (xy > 1), (from_end % 1 < REACH) & (from_end > 1)
    close = torch.cat([torch.ones_like(before[..., :1]), before, after], -1)  # [batch, n, neighbors]
    counts = (label >= 0)[..., None, None] & similar[..., None] & close[:, :, None]
    column_row = (xy[:, :, None] - REACH * offsets).floor().clamp(min=0).minimum(sides - 1)  # [batch, n, neighbors, 2]
    box = torch.cat([xy[:, :, None] - column_row, wh[:, :, None].expand_as(column_row)], -1)[:, :, None]
    position = (column_row[..., 1] * columns + column_row[..., 0]).long()[:, :, None]
    cell = position + torch.arange(count, device=position.device)[:, None] * (rows * columns)
    return cell, box, label[..., None, None], counts


@lru_cache(maxsize=32)
def _constants(device: torch.device, dtype: torch.dtype, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Cached on the device, because a copy from the host would synchronize."""
    return torch.tensor(NEIGHBORS, device=device, dtype=dtype), torch.tensor((columns, rows), device=device, dtype=dtype)


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of boxes [..., 4] with center, width and height. It is lower for distant centers and other aspect ratios."""
    (wa, ha), (wb, hb) = a[..., 2:].unbind(-1), b[..., 2:].unbind(-1)
    low_a, high_a, low_b, high_b = (box[..., :2] + half * box[..., 2:] for box in (a, b) for half in (-0.5, 0.5))
    width, height = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).unbind(-1)
    intersection = width * height  # the gradient of prod() would synchronize
    overlap = intersection / (wa * ha + wb * hb - intersection + EPS)
    diagonal = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).square().sum(-1) + EPS
    distance = (a[..., :2] - b[..., :2]).square().sum(-1) / diagonal
    shape = 4 / math.pi**2 * (torch.atan(wb / (hb + EPS)) - torch.atan(wa / (ha + EPS))).square()
    with torch.no_grad():
        weight = shape / (shape - overlap + 1 + EPS)
    return overlap - distance - weight * shape
