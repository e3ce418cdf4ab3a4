"""The loss of YOLOv5 (v6): which cells answer for an object, and how far their boxes, objectness and classes are off.

Shapes depend on the settings alone, and nothing waits for the device: a step can be recorded as a CUDA graph. An object
or a pairing that does not count has the weight 0 in place of being left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Gains = tuple[float, float, float]
GAINS: Gains = (0.05, 1.0, 0.5)  # what boxes, objectness (at 640 pixels) and classes (if there are 80) count
USUAL_SIZE, USUAL_COLUMNS, USUAL_CLASSES = 640, 80, 80  # of pictures, and of their finest map
NOMINAL = 64  # YOLOv5 sums over a batch and gathers batches up to this number of pictures; learning rates are for that
BALANCE = (4.0, 1.0, 0.4)  # of the objectness on the fine, the middle and the coarse map
RATIO = 4.0  # an anchor answers for boxes whose sides differ from its own by less than this factor
REACH = 0.5  # cells: a neighbour answers too if the centre is closer to it than this
NEIGHBOURS = ((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1))  # the cell itself, then what is subtracted for left, up, right, down
EPS = 1e-7


def yolo_loss(maps: Sequence[Tensor], targets: Tensor, anchors: Tensor, size: int, gains: Gains = GAINS) -> Tensor:
    """The loss of raw maps [batch, anchors, rows, columns, 5 + classes], as if for a batch of 64 pictures.

    ``targets`` [batch, n, 5] are class, centre x, y, width and height in pixels, with class -1 for none; ``anchors``
    [maps, anchors, 2] are widths and heights in pixels; ``size`` is the width of the pictures.
    """
    total = targets.new_zeros(())
    for raw, own, balance in zip(maps, anchors, BALANCE, strict=True):
        total = total + map_loss(raw, targets, own, size, balance, gains)
    return total * (3 / len(maps)) * NOMINAL


def map_loss(raw: Tensor, targets: Tensor, anchors: Tensor, size: int, balance: float, gains: Gains) -> Tensor:
    raw = _full(raw)
    classes, stride = raw.shape[-1] - 5, size / raw.shape[3]
    with torch.no_grad():
        cell, box, label, counts = assigned(raw.shape, targets, anchors, stride)
        number = counts.sum().clamp(min=1)
    found = raw.flatten(1, 3).gather(1, cell.flatten(1)[..., None].expand(-1, -1, raw.shape[-1]))
    found = found.unflatten(1, cell.shape[1:])  # [batch, n, anchors, neighbours, 5 + classes]
    s = found[..., :4].sigmoid()
    guess = torch.cat([2 * s[..., :2] - 0.5, (2 * s[..., 2:]).square() * (anchors / stride)[:, None]], -1)
    fit = ciou(guess, box)
    box_loss = torch.where(counts, 1 - fit, 0).sum() / number
    with torch.no_grad():  # a cell that answers for more than one object is judged by the one it fits best
        wanted = torch.zeros_like(raw[..., 4]).flatten(1)
        value = torch.where(counts, fit.detach().clamp(min=0), 0).to(wanted.dtype)
        wanted.scatter_reduce_(1, cell.flatten(1), value.flatten(1), "amax")
    object_loss = F.binary_cross_entropy_with_logits(raw[..., 4].flatten(1), wanted)
    loss = gains[0] * box_loss + gains[1] * (size / USUAL_SIZE) ** 2 * balance * object_loss
    if classes > 1:
        truth = (label[..., None] == torch.arange(classes, device=raw.device)).to(raw.dtype)
        each = F.binary_cross_entropy_with_logits(found[..., 5:], truth.expand_as(found[..., 5:]), reduction="none").mean(-1)
        loss = loss + gains[2] * classes / USUAL_CLASSES * torch.where(counts, each, 0).sum() / number
    return loss


def yolo_distance(maps: Sequence[Tensor], wanted: Sequence[Tensor], temperature: float) -> Tensor:
    """How far raw maps are from a teacher's, on the scale of the loss; 0 where they are equal.

    Objectness counts everywhere, boxes and classes where the teacher sees something, by how sure it is (Mehta and Ozturk 2018):
    what it says about empty cells is noise. Temperature softens objectness and classes.
    """
    total = torch.zeros((), device=maps[0].device)
    small = (maps[0].shape[3] / USUAL_COLUMNS) ** 2  # as in the loss: (size / 640)^2
    for raw, told, balance in zip(map(_full, maps), map(_full, wanted), BALANCE, strict=True):
        sure = told[..., 4].sigmoid()
        apart = _apart(raw[..., 4:] / temperature, told[..., 4:] / temperature)  # [..., objectness and classes]
        apart = temperature**2 * apart
        boxes = (raw[..., :4].sigmoid() - told[..., :4].sigmoid()).square().sum(-1)
        seen = GAINS[0] * boxes
        if raw.shape[-1] > 6:
            seen = seen + GAINS[2] / USUAL_CLASSES * apart[..., 1:].sum(-1)
        total = total + (sure * seen).sum() / sure.sum().clamp(min=EPS) + GAINS[1] * small * balance * apart[..., 0].mean()
    return total * (3 / len(maps)) * NOMINAL


def _apart(logits: Tensor, wanted: Tensor) -> Tensor:
    """``KL(sigmoid(wanted), sigmoid(logits))``, element by element."""
    target = wanted.sigmoid()
    cross, own = (F.binary_cross_entropy_with_logits(x, target, reduction="none") for x in (logits, wanted))
    return cross - own


def _full(raw: Tensor) -> Tensor:
    return raw.float() if raw.dtype in (torch.bfloat16, torch.float16) else raw


def assigned(shape: torch.Size, targets: Tensor, anchors: Tensor, stride: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every object, anchor and neighbour [batch, n, anchors, neighbours]: the number of the cell among all of its
    picture, the box seen from there [..., 4] in cells, the class, and whether the pairing counts."""
    _, count, rows, columns, _ = shape
    offsets, sides = _constants(targets.device, targets.dtype, columns, rows)
    label, xy, wh = targets[..., 0], targets[..., 1:3] / stride, targets[..., 3:5] / stride  # in cells
    ratio = wh[:, :, None] / (anchors / stride)
    near = torch.maximum(ratio, 1 / ratio).amax(-1) < RATIO  # [batch, n, anchors]
    back = sides - xy
    before, after = (xy % 1 < REACH) & (xy > 1), (back % 1 < REACH) & (back > 1)
    close = torch.cat([torch.ones_like(before[..., :1]), before, after], -1)  # [batch, n, neighbours]
    counts = (label >= 0)[..., None, None] & near[..., None] & close[:, :, None]
    column_row = (xy[:, :, None] - REACH * offsets).floor().clamp(min=0).minimum(sides - 1)  # [batch, n, neighbours, 2]
    box = torch.cat([xy[:, :, None] - column_row, wh[:, :, None].expand_as(column_row)], -1)[:, :, None]
    place = (column_row[..., 1] * columns + column_row[..., 0]).long()[:, :, None]
    cell = place + torch.arange(count, device=place.device)[:, None] * (rows * columns)
    return cell, box, label[..., None, None], counts


@lru_cache(maxsize=32)
def _constants(device: torch.device, dtype: torch.dtype, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """Kept on the device, because sending them there would wait for it."""
    return torch.tensor(NEIGHBOURS, device=device, dtype=dtype), torch.tensor((columns, rows), device=device, dtype=dtype)


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of boxes [..., 4] given by centre, width and height: less for centres apart and for other shapes."""
    (wa, ha), (wb, hb) = a[..., 2:].unbind(-1), b[..., 2:].unbind(-1)
    near_a, far_a, near_b, far_b = (box[..., :2] + half * box[..., 2:] for box in (a, b) for half in (-0.5, 0.5))
    wide, high = (torch.minimum(far_a, far_b) - torch.maximum(near_a, near_b)).clamp(min=0).unbind(-1)
    both = wide * high  # the gradient of prod() would wait for the device
    overlap = both / (wa * ha + wb * hb - both + EPS)
    around = (torch.maximum(far_a, far_b) - torch.minimum(near_a, near_b)).square().sum(-1) + EPS
    apart = (a[..., :2] - b[..., :2]).square().sum(-1) / around
    shape = 4 / math.pi**2 * (torch.atan(wb / (hb + EPS)) - torch.atan(wa / (ha + EPS))).square()
    with torch.no_grad():
        weight = shape / (shape - overlap + 1 + EPS)
    return overlap - apart - weight * shape
