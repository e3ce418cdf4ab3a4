"""The handwritten digits: fixed splits, shifts and the package that they need."""

from __future__ import annotations

import sys

import pytest
import torch

from smartprune import SmartpruneError
from smartprune.tasks.digits import MEAN, STD, Digits, load, shift_images

CPU = torch.device("cpu")


def test_digits_splits_are_fixed_disjoint_and_stratified() -> None:
    splits = {split: load(split) for split in ("train", "validation", "test")}
    sizes = {split: len(labels) for split, (_, labels) in splits.items()}
    assert sum(sizes.values()) == 1797
    assert sizes == {"train": 899, "validation": 359, "test": 539}
    for _, labels in splits.values():
        share = labels.bincount(minlength=10) / len(labels)
        assert (share - 0.1).abs().max() < 0.006
    images = torch.cat([images for images, _ in splits.values()]).flatten(1)
    assert len(images.unique(dim=0)) == 1797
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_digits_order_depends_on_seed_and_epoch() -> None:
    data = Digits().data("train", CPU)
    first = {key: next(iter(data.batches(64, *key)))[1].tolist() for key in [(0, 0), (0, 1), (1, 0)]}
    assert first[0, 0] != first[0, 1] != first[1, 0] != first[0, 0]
    seen = torch.cat([labels for _, labels in data.batches(1, seed=0, epoch=0)])
    assert torch.equal(seen.sort().values, load("train")[1].sort().values)


def test_digits_evaluation_sees_every_image_once_unchanged() -> None:
    images, labels = load("test")
    seen = list(Digits().data("test", CPU).batches(100, seed=0, epoch=0))
    assert torch.equal(torch.cat([x for x, _ in seen]), images)
    assert torch.equal(torch.cat([y for _, y in seen]), labels)


def test_images_are_shifted_by_individual_offsets() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    shifts = torch.tensor([[1, 2, 0], [1, 1, 2]])  # down 0, 1, -1; right 0, 0, 1
    unchanged, down, up_right = shift_images(image.expand(3, 1, 4, 4), shifts, largest=1)[:, 0]
    background = -MEAN / STD
    assert torch.equal(unchanged, image[0, 0])
    assert torch.equal(down[1:], image[0, 0, :3])
    assert torch.allclose(down[0], torch.full((4,), background))
    assert torch.equal(up_right[:3, 1:], image[0, 0, 1:, :3])
    assert torch.allclose(up_right[:, 0], torch.full((4,), background))


def test_shift_zero_still_shuffles() -> None:
    data = Digits(shift=0).data("train", CPU)
    images, labels = next(iter(data.batches(899, seed=0, epoch=0)))
    expected, ordered_labels = load("train")
    assert not torch.equal(labels, ordered_labels)
    assert torch.equal(images.flatten(1).unique(dim=0), expected.flatten(1).unique(dim=0))


def test_missing_scikit_learn_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    load.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SmartpruneError, match=r"pip install scikit-learn"):
        load("train")
