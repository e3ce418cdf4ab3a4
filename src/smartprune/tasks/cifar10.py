"""CIFAR-10: 60,000 colour pictures of 32x32 in ten classes. It is not part of this package; see ``cifar10_files``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .cifar10_files import CLASSES, COLOURS, SIDE, read
from .distance import soft_distance
from .task import Data, generator

Batch = tuple[Tensor, Tensor]  # pictures [batch, 3, 32, 32] in channels_last, labels [batch]

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of red, green, blue in 0 ... 1
CHUNK = 8192  # pictures made ready at once: few launches on a GPU, little memory
EVALUATE = 500  # pictures per step of an evaluation


@dataclass(frozen=True)
class Cifar10:
    """What is in the picture? Judged by accuracy.

    With ``holdout`` the last so many pictures of the training set are the validation split; without, training sees all
    of them and there is no metric before the end, because the test split must not choose anything.
    """

    folder: str = ""  # where the data lies; else the environment variable SMARTPRUNE_DATA says it
    holdout: int = 0
    limit: int = 0  # only the first so many pictures of train and of test; 0 is all of them
    pad: int = 4  # training pictures are cropped at random after so many pixels were added at every side
    flip: bool = True  # half of the training pictures are mirrored

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
                raise SmartpruneError(f"cifar10: {name}={getattr(self, name)} should not be negative")
        if not 0 <= self.pad <= SIDE:
            raise SmartpruneError(f"cifar10: pad={self.pad} should be 0 to {SIDE} pixels")

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=CLASSES, in_channels=COLOURS)

    def example(self) -> Tensor:
        return torch.zeros(1, COLOURS, SIDE, SIDE)

    def data(self, split: str, device: torch.device) -> Data:
        if split not in ("train", "validation", "test"):
            raise SmartpruneError(f"cifar10: split={split!r}; it is train, validation or test")
        pictures, labels = read(self._folder(), "test" if split == "test" else "train")
        end = min(self.limit or len(labels), len(labels))
        if split == "test":
            chosen = slice(0, end)
        else:
            if self.holdout >= end:
                raise SmartpruneError(f"cifar10: holdout={self.holdout} leaves none of {end} pictures to train on")
            chosen = slice(0, end - self.holdout) if split == "train" else slice(end - self.holdout, end)
        training = split == "train"
        return Split(
            torch.from_numpy(pictures[chosen]).to(device),
            torch.from_numpy(labels[chosen]).to(device).long(),
            training,
            self.pad if training else 0,
            self.flip and training,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(model(pictures), labels)

    def metric(self, model: nn.Module, data: Data) -> float:
        right = torch.zeros((), dtype=torch.int64)
        total = 0
        for pictures, labels in data.batches(EVALUATE, seed=0, epoch=0):
            right = right.to(labels.device) + (model(pictures).argmax(1) == labels).sum()
            total += len(labels)
        return int(right) / total

    def _folder(self) -> Path:
        folder = self.folder or os.environ.get("SMARTPRUNE_DATA", "")
        if not folder:
            raise SmartpruneError(
                "cifar10: no data folder was given; say where CIFAR-10 lies with --data DIR, or set the environment "
                "variable SMARTPRUNE_DATA"
            )
        return Path(folder).expanduser()


class Split:
    """Pictures and labels on the device. Training data is shuffled, cropped, mirrored, and drops a short last batch."""

    def __init__(self, pictures: Tensor, labels: Tensor, training: bool, pad: int, flip: bool) -> None:
        self.padded = F.pad(pictures, (0, 0, pad, pad, pad, pad))  # [n, 32 + 2 pad, 32 + 2 pad, 3], bytes; black around
        self.labels, self.training, self.pad, self.flip = labels, training, pad, flip
        self.mean = torch.tensor(MEAN, device=labels.device) * 255
        self.scale = 1 / (torch.tensor(STD, device=labels.device) * 255)

    def steps(self, size: int) -> int:
        return max(1, len(self.labels) // size) if self.training else -(-len(self.labels) // size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        draws = self._draw(seed, epoch)
        end = min(self.steps(size) * size, len(self.labels))
        if every > 1:
            draws = torch.cat([draws[:, at : min(at + size, end)] for at in range(first * size, end, every * size)], 1)
            first, end = 0, draws.shape[1]
        chunk = max(1, CHUNK // size) * size
        for start in range(first * size, end, chunk):
            order, down, right, mirrored = draws[:, start : min(start + chunk, end)]
            pictures, labels = self._made_ready(order, down, right, mirrored), self.labels[order]
            yield from zip(pictures.split(size), labels.split(size), strict=True)

    def still(self) -> Split:
        out = copy(self)
        out.training = False
        return out

    def _draw(self, seed: int, epoch: int) -> Tensor:
        """Which picture, how far down and right, whether mirrored: [4, n], drawn on the CPU for every device alike."""
        count = len(self.labels)
        if not self.training:
            middle = torch.tensor([self.pad, self.pad, 0], device=self.labels.device)[:, None].expand(3, count)
            return torch.cat([torch.arange(count, device=middle.device)[None], middle])
        draw = generator(seed, epoch)
        order = torch.randperm(count, generator=draw)
        moves = torch.randint(0, 2 * self.pad + 1, (2, count), generator=draw)
        mirrored = torch.randint(0, 2, (1, count), generator=draw) * self.flip
        out = torch.cat([order[None], moves, mirrored])
        if self.labels.is_cuda:  # pinned, so that the copy waits for nothing
            return out.pin_memory().to(self.labels.device, non_blocking=True)
        return out

    def _made_ready(self, order: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
        line = torch.arange(SIDE, device=order.device)
        rows = down[:, None] + line  # [count, 32]
        columns = right[:, None] + torch.where(mirrored[:, None] == 1, SIDE - 1 - line, line)
        cropped = self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]]  # [count, 32, 32, 3]
        return cropped.float().sub_(self.mean).mul_(self.scale).permute(0, 3, 1, 2)
