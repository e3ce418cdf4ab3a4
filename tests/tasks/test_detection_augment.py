"""Augmentation of images and boxes."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.box_folders import COLORS, edit_annotations, write_boxes
from helpers.detection import CPU, NO_AUGMENTATION, make_task
from smartprune.tasks.detection import Split
from smartprune.tasks.detection_augment import AugmentSettings, draw, jitter_colors
from smartprune.tasks.images import ImageStore

pytest.importorskip("PIL")


def test_training_images_without_augmentation_equal_evaluation_images(tmp_path: Path) -> None:
    task = make_task(write_boxes(tmp_path), **NO_AUGMENTATION)
    training, cached = task.data("train", CPU), task.data("train", CPU).store.cached  # type: ignore[attr-defined]
    still = Split(ImageStore(lambda i: cached[i], cached, CPU), training.truth, 64, None)  # type: ignore[attr-defined]
    images, targets = next(iter(still.batches(6, seed=0, epoch=0)))
    order = draw(training.augment, 6, 0, 0).order[:, 0]  # type: ignore[attr-defined]
    ((augmented, boxes),) = training.batches(6, seed=0, epoch=0)
    torch.testing.assert_close(augmented, images[order], rtol=0, atol=1e-5)
    valid = boxes[..., 0] >= 0
    torch.testing.assert_close(boxes[valid], targets[order][valid])
    assert torch.equal(valid, targets[order][..., 0] >= 0)


@pytest.mark.parametrize("mosaic", [0.0, 0.5, 1.0])
def test_images_and_boxes_are_augmented_together(mosaic: float, tmp_path: Path) -> None:
    """The color of a class fills its boxes, and is rare outside of them."""
    edit_annotations(write_boxes(tmp_path, train=24), lambda data: [box.update(iscrowd=0) for box in data["annotations"]])
    data = make_task(tmp_path, **{**NO_AUGMENTATION, "mosaic": mosaic, "scale": 0.5, "shift": 0.2, "flip": True}).data("train", CPU)
    boxes = most = 0
    for epoch in range(2):
        for images, targets in data.batches(8, seed=0, epoch=epoch):
            assert images.shape == (8, 3, 64, 64)
            color = torch.tensor(COLORS)[:, :, None, None] / 255
            near = ((images[:, None] - color).abs().amax(2) < 0.35).float()  # [image, class, y, x]
            for labels, masks in zip(targets, near, strict=True):
                rest = masks.clone()
                for label, x, y, w, h in labels[labels[:, 0] >= 0].tolist():
                    top, bottom, left, right = (round(v) for v in (y - h / 2, y + h / 2, x - w / 2, x + w / 2))
                    if min(bottom - top, right - left) > 5:
                        inner = masks[int(label), top + 2 : bottom - 2, left + 2 : right - 2]
                        assert float(inner.mean()) > 0.95
                        boxes += 1
                    rest[int(label), max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = 0
                assert int(rest.sum()) < 60  # clipped boxes that were dropped
                most = max(most, int((labels[:, 0] >= 0).sum()))
    assert boxes > 40
    assert (most > 3) == (mosaic > 0)


def test_draws_stay_in_their_ranges() -> None:
    settings = AugmentSettings(mosaic=0.5, scale=0.3, shift=0.1, flip=True, hue=0.02, saturation=0.5, brightness=0.4)
    draws = draw(settings, 4000, 1, 2)
    assert torch.equal(draws.order[:, 0].sort().values, torch.arange(4000))
    assert 0.45 < float(draws.single.float().mean()) < 0.55
    assert 0.45 < float((draws.flip < 0).float().mean()) < 0.55
    for values, limit in ((draws.scale - 1, 0.3), (draws.shift, 0.1), (draws.middle, 0.5), (draws.color[:, 2] - 1, 0.4)):
        assert 0.95 * limit < float(values.abs().max()) <= limit + 1e-6
    assert not torch.equal(draws.order, draw(settings, 4000, 1, 3).order)
    assert bool(draw(AugmentSettings(0.0, 0.3, 0.1, flip=False), 50, 0, 0).single.all())


def test_color_jitter_matches_hsv() -> None:
    images = torch.rand(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    identity = torch.tensor([[0.0, 1.0, 1.0]]).expand(5, 3)
    torch.testing.assert_close(jitter_colors(images, identity), images)
    out = jitter_colors(images, torch.tensor([[0.0, 0.7, 0.8]]).expand(5, 3))
    for before, after in zip(images.permute(0, 2, 3, 1).reshape(-1, 3), out.permute(0, 2, 3, 1).reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before.tolist())
        assert after.tolist() == pytest.approx(colorsys.hsv_to_rgb(hue, 0.7 * saturation, 0.8 * value), abs=1e-5)
    red = torch.tensor([0.8, 0.2, 0.2])[None, :, None, None]
    rotated = jitter_colors(red, torch.tensor([[2 * np.pi / 3, 1.0, 1.0]]))  # by a third of a turn, so red becomes green or blue
    assert sorted(rotated.flatten().tolist()) == pytest.approx([0.2, 0.2, 0.8], abs=1e-5)
    assert float(rotated[0, 0]) == pytest.approx(0.2, abs=1e-5)
    gray = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(jitter_colors(gray, torch.tensor([[0.3, 1.5, 1.0]])), gray)
