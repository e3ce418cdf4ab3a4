"""1,797 handwritten digits of 8x8 pixels, which come with scikit-learn: the whole job in about a minute on a CPU."""

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
from .task import Data, generator

Batch = tuple[Tensor, Tensor]  # images [batch, 1, 8, 8], labels [batch]

SHARES = {"test": 0.3, "validation": 0.2}  # of every class, rounded; the rest is for training
MEAN, STD = 4.88, 6.02  # of all pixels, which are 0 to 16


@dataclass(frozen=True)
class Digits:
    """Which digit is it? A small residual network, judged by accuracy."""

    width: int = 12  # channels of resnet8's first stage
    shift: int = 1  # training images move by up to so many pixels each way

    recipe: ClassVar[Recipe] = Recipe(
        model="resnet8",
        block="8x4",
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
            raise SmartpruneError(f"digits: width={self.width} should be at least 1")
        if not 0 <= self.shift <= 3:
            raise SmartpruneError(f"digits: shift={self.shift} should be 0 to 3 pixels; the images have 8")

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
        right = total = 0
        for images, labels in data.batches(512, seed=0, epoch=0):
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
        return right / total


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels in memory. Training data is shuffled, moved about, and drops a short last batch."""

    images: Tensor
    labels: Tensor
    training: bool
    shift: int

    def steps(self, size: int) -> int:
        return max(1, len(self.labels) // size) if self.training else -(-len(self.labels) // size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        images, labels = self.images, self.labels
        if self.training:
            draw = generator(seed, epoch)
            order = torch.randperm(len(labels), generator=draw).to(labels.device)
            moves = torch.randint(0, 2 * self.shift + 1, (2, len(labels)), generator=draw).to(labels.device)
            images, labels = shifted(images[order], moves, self.shift), labels[order]
        for step in range(first, self.steps(size), every):
            yield images[step * size : (step + 1) * size], labels[step * size : (step + 1) * size]

    def still(self) -> Split:
        return replace(self, training=False)


def shifted(images: Tensor, moves: Tensor, reach: int) -> Tensor:
    """Every image moved by its own (down, right) in 0 ... 2 * reach, less ``reach``; background enters at the edges."""
    count, _, height, width = images.shape
    padded = F.pad(images, (reach,) * 4, value=-MEAN / STD)
    rows = (2 * reach - moves[0])[:, None] + torch.arange(height, device=images.device)  # [count, height]
    columns = (2 * reach - moves[1])[:, None] + torch.arange(width, device=images.device)
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded[each, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


@lru_cache(maxsize=3)
def load(split: str) -> Batch:
    """Normalised images [n, 1, 8, 8] and labels [n] of a split, which is fixed and holds every class alike."""
    if split not in ("train", *SHARES):
        raise SmartpruneError(f"digits: split={split!r}; it is train, validation or test")
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise SmartpruneError(
            "the digits come with scikit-learn, which is not installed; run: pip install 'smartprune[digits]'"
        ) from None
    bunch = load_digits()
    labels = torch.from_numpy(bunch.target).long()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1).sub(MEAN).div(STD)
    chosen = []
    for digit in range(10):
        of_class = (labels == digit).nonzero().flatten()
        of_class = of_class[torch.randperm(len(of_class), generator=torch.Generator().manual_seed(digit))]
        test = round(SHARES["test"] * len(of_class))
        held = test + round(SHARES["validation"] * len(of_class))
        chosen.append({"test": of_class[:test], "validation": of_class[test:held], "train": of_class[held:]}[split])
    index = torch.cat(chosen).sort().values
    return images[index], labels[index]
