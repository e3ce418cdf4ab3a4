"""CIFAR-10: 60,000 color images of 32x32 pixels in ten classes. The data is not part of the package; see ``cifar10_files``."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .cifar10_files import CHANNELS, CLASSES, SIDE, read
from .distance import soft_distance
from .images import data_folder, to_device
from .task import Data, accuracy, check_split, generator, step_count

Batch = tuple[Tensor, Tensor]  # images [batch, 3, 32, 32] in channels_last, labels [batch]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of red, green and blue in [0, 1]
CHUNK = 8192  # images prepared at once: few kernel launches, little memory
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Cifar10:
    """Classification of CIFAR-10. The metric is accuracy.

    ``holdout`` images at the end of the training set form the validation split. Without it, all images are used for
    training, and there is no metric before the end, because the test split must not be used to choose anything.
    """

    folder: str = ""  # the data folder; empty: the environment variable SMARTPRUNE_DATA
    holdout: int = 0
    limit: int = 0  # number of training images and of test images to use; 0: all
    pad: int = 4  # training images are padded by this number of pixels on each side and cropped at random
    flip: bool = True  # flip half of the training images

    recipe: ClassVar[Recipe] = Recipe(
        model="resnet18",
        block="16x8",
        sparsity=0.95,
        dense_epochs=200,
        search_epochs=40,
        finetune_epochs=160,
        batch=128,
        lr=0.1,
        search_lr=0.02,
        finetune_lr=0.02,
        score_lr=0.02,
        momentum=0.9,
        weight_decay=5e-4,
        schedule_over="pruning",
        amp="auto",
        checkpoint_seconds=60.0,
    )
    models: ClassVar[tuple[str, ...]] = ("resnet18", "densenet", "googlenet", "mobilenetv2")
    measure: ClassVar[str] = "accuracy"
    distance = staticmethod(soft_distance)

    def __post_init__(self) -> None:
        for name in ("holdout", "limit"):
            if getattr(self, name) < 0:
                raise SmartpruneError(f"cifar10: {name}={getattr(self, name)} is negative; use 0 or more")
        if not 0 <= self.pad <= SIDE:
            raise SmartpruneError(f"cifar10: pad={self.pad} is outside 0 to {SIDE} pixels")

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=CLASSES, in_channels=CHANNELS)

    def example(self) -> Tensor:
        return torch.zeros(1, CHANNELS, SIDE, SIDE)

    def data(self, split: str, device: torch.device) -> Data:
        check_split("cifar10", split)
        images, labels = read(data_folder("cifar10", self.folder), "test" if split == "test" else "train")
        end = min(self.limit or len(labels), len(labels))
        if split == "test":
            part = slice(0, end)
        else:
            if self.holdout >= end:
                raise SmartpruneError(f"cifar10: holdout={self.holdout} leaves none of {end} images for training; use fewer")
            part = slice(0, end - self.holdout) if split == "train" else slice(end - self.holdout, end)
        training = split == "train"
        return Split(
            torch.from_numpy(images[part]).to(device),
            torch.from_numpy(labels[part]).to(device).long(),
            training,
            self.pad if training else 0,
            self.flip and training,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metric(self, model: nn.Module, data: Data) -> float:
        return accuracy(model, data, EVALUATION_BATCH)


class Split:
    """Images and labels on the device. Training data is shuffled, cropped and flipped."""

    def __init__(self, images: Tensor, labels: Tensor, training: bool, pad: int, flip: bool) -> None:
        self.padded = F.pad(images, (0, 0, pad, pad, pad, pad))  # bytes [n, 32 + 2 pad, 32 + 2 pad, 3], padded with black
        self.labels, self.training, self.pad, self.flip = labels, training, pad, flip
        self.mean = torch.tensor(MEAN, device=labels.device) * 255
        self.scale = 1 / (torch.tensor(STD, device=labels.device) * 255)

    def steps(self, size: int) -> int:
        return step_count(len(self.labels), size, self.training)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        draws = self._draw(seed, epoch)
        end = min(self.steps(size) * size, len(self.labels))
        if every > 1:
            draws = torch.cat([draws[:, at : min(at + size, end)] for at in range(first * size, end, every * size)], 1)
            first, end = 0, draws.shape[1]
        chunk = max(1, CHUNK // size) * size
        for start in range(first * size, end, chunk):
            order, down, right, flipped = draws[:, start : min(start + chunk, end)]
            images, labels = self._crop(order, down, right, flipped), self.labels[order]
            yield from zip(images.split(size), labels.split(size), strict=True)

    def still(self) -> Split:
        out = copy(self)
        out.training = False
        return out

    def _draw(self, seed: int, epoch: int) -> Tensor:
        """[4, n]: index of the image, offsets down and right, and 1 to flip. Drawn on the CPU, so all devices agree."""
        count = len(self.labels)
        if not self.training:
            middle = torch.tensor([self.pad, self.pad, 0], device=self.labels.device)[:, None].expand(3, count)
            return torch.cat([torch.arange(count, device=middle.device)[None], middle])
        rng = generator(seed, epoch)
        order = torch.randperm(count, generator=rng)
        offsets = torch.randint(0, 2 * self.pad + 1, (2, count), generator=rng)
        flipped = torch.randint(0, 2, (1, count), generator=rng) * self.flip
        return to_device(torch.cat([order[None], offsets, flipped]), self.labels.device)

    def _crop(self, order: Tensor, down: Tensor, right: Tensor, flipped: Tensor) -> Tensor:
        line = torch.arange(SIDE, device=order.device)
        rows = down[:, None] + line  # [count, 32]
        columns = right[:, None] + torch.where(flipped[:, None] == 1, SIDE - 1 - line, line)
        cropped = self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]]  # [count, 32, 32, 3]
        return cropped.float().sub_(self.mean).mul_(self.scale).permute(0, 3, 1, 2)
