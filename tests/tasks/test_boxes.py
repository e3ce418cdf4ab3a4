"""Overlap, non-maximum suppression and letterboxes, against slow loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.detection import slow_iou
from smartprune.tasks.boxes import Letterbox, iou, nms


def random_boxes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    start = 30 * torch.rand(count, 2, generator=rng)
    boxes = torch.cat([start, start + 2 + 20 * torch.rand(count, 2, generator=rng)], 1)
    return boxes, torch.rand(count, generator=rng), torch.randint(0, 3, (count,), generator=rng)


def slow_nms(boxes: Tensor, scores: Tensor, classes: Tensor, overlap: float, limit: int) -> list[int]:
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -float(scores[i])):
        if float(scores[i]) > 0 and len(kept) < limit:
            rivals = [k for k in kept if classes[k] == classes[i]]
            if all(slow_iou(boxes[i].tolist(), boxes[k].tolist()) <= overlap for k in rivals):
                kept.append(i)
    return kept


@pytest.mark.parametrize(("overlap", "limit"), [(0.6, 300), (0.3, 300), (0.6, 7), (0.0, 40), (1.0, 40)])
def test_nms_matches_a_slow_loop(overlap: float, limit: int) -> None:
    batch = [random_boxes(80, seed) for seed in range(4)]
    batch[3][1][5:] = 0  # an image with few detections
    boxes, scores, classes = (torch.stack(parts) for parts in zip(*batch, strict=True))
    result = nms(boxes, scores, classes, overlap, limit)
    for i, case in enumerate(batch):
        kept = [number for number in result[i].tolist() if number >= 0]
        assert kept == slow_nms(*case, overlap, limit)
        assert result[i, len(kept) :].eq(-1).all()
    torch.testing.assert_close(iou(boxes[0, :40], boxes[0, 40:])[3].item(), slow_iou(boxes[0, 3].tolist(), boxes[0, 43].tolist()))


def test_nms_matches_torchvision() -> None:
    ops = pytest.importorskip("torchvision.ops")
    boxes, scores, classes = random_boxes(300, 7)
    assert (
        nms(boxes[None], scores[None], classes[None], 0.5, 300)[0].tolist()[:20]
        == ops.batched_nms(boxes, scores, classes, 0.5)[:20].tolist()
    )


def test_nms_without_candidates_and_with_boxes_without_area() -> None:
    assert nms(torch.zeros(2, 0, 4), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64), 0.6, 5).eq(-1).all()
    flat = torch.tensor([[[3.0, 3, 3, 8], [3, 3, 3, 8]]])  # does not overlap with itself
    assert nms(flat, torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int64), 0.6, 4).tolist() == [[0, 1, -1, -1]]


def test_letterbox_fills_the_longer_side_and_keeps_the_aspect_ratio() -> None:
    for width, height in ((640, 480), (31, 500), (7, 7), (3, 999)):
        box = Letterbox(width, height, 64)
        assert max(box.inner) == 64
        assert all(s >= 0 and s + i <= 64 for s, i in zip(box.start, box.inner, strict=True))
        assert box.inner[0] * height == pytest.approx(box.inner[1] * width, abs=max(width, height))
