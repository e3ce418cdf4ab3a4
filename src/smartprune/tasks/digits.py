"""The 1,797 handwritten digits of scikit-learn, 8x8 pixels each. A whole training job takes about a minute on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .distance import soft_distance
from .task import Data, accuracy, check_split, generator, step_count

Batch = tuple[Tensor, Tensor]  # images [batch, 1, 8, 8], labels [batch]

SHARES = {"test": 0.3, "validation": 0.2}  # share of each class, rounded; the rest is for training
MEAN, STD = 4.88, 6.02  # of all pixels, whose values are 0 to 16


@dataclass(frozen=True)
class Digits:
    """Classification of digits with a small residual network. The metric is accuracy."""

    width: int = 12  # channels of the first stage of resnet8
    shift: int = 1  # largest shift of a training image in pixels, in each direction

    recipe: ClassVar[Recipe] = Recipe(
        model="resnet8",
        block="16x8",
        sparsity=0.9,
        dense_epochs=30,
        search_epochs=40,
        finetune_epochs=30,
        batch=64,
        lr=0.1,
        search_lr=0.1,
        finetune_lr=0.1,
        score_lr=0.05,
        momentum=0.9,
        weight_decay=5e-4,
        threads=1,
    )
    models: ClassVar[tuple[str, ...]] = ("resnet8", "resnet18")
    measure: ClassVar[str] = "accuracy"
    distance = staticmethod(soft_distance)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise SmartpruneError(f"digits: width={self.width} is too small; use at least 1")
        if not 0 <= self.shift <= 3:
            raise SmartpruneError(f"digits: shift={self.shift} is outside 0 to 3; the images are 8 pixels wide")

    def model(self, name: str) -> nn.Module:
        if name == "resnet8":
            return build(name, num_classes=10, in_channels=1, width=self.width)
        return build(name, num_classes=10, in_channels=1)

    def example(self) -> Tensor:
        return torch.zeros(1, 1, 8, 8)

    def data(self, split: str, device: torch.device) -> Data:
        images, labels = load(split)
        return Split(images.to(device), labels.to(device), training=split == "train", shift=self.shift)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metric(self, model: nn.Module, data: Data) -> float:
        return accuracy(model, data, 512)


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels in memory. Training data is shuffled and shifted."""

    images: Tensor
    labels: Tensor
    training: bool
    shift: int

    def steps(self, size: int) -> int:
        return step_count(len(self.labels), size, self.training)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        images, labels = self.images, self.labels
        if self.training:
            rng = generator(seed, epoch)
            order = torch.randperm(len(labels), generator=rng).to(labels.device)
            shifts = torch.randint(0, 2 * self.shift + 1, (2, len(labels)), generator=rng).to(labels.device)
            images, labels = shift_images(images[order], shifts, self.shift), labels[order]
        for step in range(first, self.steps(size), every):
            yield images[step * size : (step + 1) * size], labels[step * size : (step + 1) * size]

    def still(self) -> Split:
        return replace(self, training=False)


def shift_images(images: Tensor, shifts: Tensor, largest: int) -> Tensor:
    """Shifts each image by its own ``shifts - largest`` (down, right), and fills the edges with background."""
    count, _, height, width = images.shape
    padded = F.pad(images, (largest,) * 4, value=-MEAN / STD)
    rows = (2 * largest - shifts[0])[:, None] + torch.arange(height, device=images.device)  # [count, height]
    columns = (2 * largest - shifts[1])[:, None] + torch.arange(width, device=images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded[index, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


@lru_cache(maxsize=3)
def load(split: str) -> Batch:
    """Normalized images [n, 1, 8, 8] and labels [n] of a split. The splits are fixed and stratified by class."""
    check_split("digits", split)
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise SmartpruneError(
            "digits: the data needs scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from None
    bunch = load_digits()
    labels = torch.from_numpy(bunch.target).long()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1).sub(MEAN).div(STD)
    indices = []
    for digit in range(10):
        of_class = (labels == digit).nonzero().flatten()
        of_class = of_class[torch.randperm(len(of_class), generator=torch.Generator().manual_seed(digit))]
        test = round(SHARES["test"] * len(of_class))
        heldout = test + round(SHARES["validation"] * len(of_class))
        indices.append({"test": of_class[:test], "validation": of_class[test:heldout], "train": of_class[heldout:]}[split])
    index = torch.cat(indices).sort().values
    return images[index], labels[index]
