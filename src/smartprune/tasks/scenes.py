"""Scenes of handwritten digits with masks: segmentation that needs no download and is done in about a minute on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .digits import MEAN, STD, load
from .distance import soft_distance
from .pictures import Shelf
from .segmentation import Batch, Moves, Split, loss, metric
from .task import Data

SIDE, CLASSES = 64, 11  # class 0 is the background, class d + 1 the ink of digit d
SCENES = {"train": 480, "validation": 120, "test": 240}
INK = 0.35  # a pixel belongs to a digit if so much of it is ink


@dataclass(frozen=True)
class Scenes:
    """Where are the digits, and which? The digits of the splits are those of the task ``digits``, so none is in two."""

    data_seed: int = 0  # of the scenes themselves
    width: int = 16  # channels of segnet's first layer

    recipe: ClassVar[Recipe] = Recipe(
        model="segnet",
        block="8x4",
        sparsity=0.8,
        dense_epochs=20,
        search_epochs=12,
        finetune_epochs=12,
        batch=16,
        lr=0.05,
        search_lr=0.05,
        finetune_lr=0.05,
        score_lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,
        threads=1,
    )
    models: ClassVar[tuple[str, ...]] = ("segnet", "bisenetv2")
    measure: ClassVar[str] = "mIoU"
    distance = staticmethod(soft_distance)

    def __post_init__(self) -> None:
        if self.width < 1 or self.data_seed < 0:
            raise SmartpruneError(f"scenes: width={self.width} should be at least 1 and data_seed={self.data_seed} at least 0")

    def model(self, name: str) -> nn.Module:
        return SegNet(self.width) if name == "segnet" else build(name, num_classes=CLASSES)

    def example(self) -> Tensor:
        return torch.zeros(1, 3, SIDE, SIDE)

    def data(self, split: str, device: torch.device) -> Data:
        scenes = compose(split, self.data_seed)
        moves = Moves(SIDE, SIDE, smallest=0.9, largest=1.2, flip=False) if split == "train" else None
        return Split(Shelf(lambda number: scenes[number], scenes, device), len(scenes), (SIDE, SIDE), moves)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float:
        return metric(model, data)


@lru_cache(maxsize=3)
def compose(split: str, seed: int) -> Tensor:
    """Scenes and masks of a split as bytes [n, 64, 64, 4]; every scene depends on the seed and its number alone."""
    if split not in SCENES:
        raise SmartpruneError(f"scenes: split={split!r}; it is {', '.join(SCENES)}")
    images, labels = load(split)
    ink = (images * STD + MEAN).clamp_(0, 16) / 16
    return torch.stack([scene(ink, labels, (seed, list(SCENES).index(split), number)) for number in range(SCENES[split])])


def scene(ink: Tensor, labels: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Two to four digits of 20 to 32 pixels, each in a quarter and a colour of its own, on a background that changes slowly."""
    draw = np.random.default_rng(seed)
    corners = torch.from_numpy(draw.uniform(0, 110, (1, 3, 3, 3))).float()
    picture = (
        F.interpolate(corners, (SIDE, SIDE), mode="bilinear")[0] + torch.from_numpy(draw.normal(0, 8, (3, SIDE, SIDE))).float()
    )
    mask = torch.zeros(SIDE, SIDE)
    for quarter in draw.permutation(4)[: draw.integers(2, 5)].tolist():
        chosen, size = int(draw.integers(len(ink))), int(draw.integers(20, 33))
        top, left = (cell * SIDE // 2 + int(draw.integers(SIDE // 2 - size + 1)) for cell in divmod(quarter, 2))
        colour = torch.from_numpy(draw.uniform(140, 255, (3, 1, 1))).float()
        digit = F.interpolate(ink[chosen][None], (size, size), mode="bilinear")[0]
        at = (slice(top, top + size), slice(left, left + size))
        picture[:, *at] = picture[:, *at] * (1 - digit) + colour * digit
        mask[at] = torch.where(digit[0] > INK, labels[chosen] + 1.0, mask[at])
    return torch.cat([picture, mask[None]]).clamp_(0, 255).round_().to(torch.uint8).permute(1, 2, 0).contiguous()


def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Convolution of 3x3, batch norm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class SegNet(nn.Module):
    """Down to an eighth of the side and half of the way up again, with what was seen on the way down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stage1 = layer(3, width, 2)
        self.stage2 = nn.Sequential(layer(width, 2 * width, 2), layer(2 * width, 2 * width))
        self.stage3 = nn.Sequential(layer(2 * width, 4 * width, 2), layer(4 * width, 4 * width), layer(4 * width, 2 * width))
        self.up = layer(4 * width, width)
        self.join = layer(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        half: Tensor = self.stage1(x)
        quarter: Tensor = self.stage2(half)
        up = F.interpolate(self.stage3(quarter), quarter.shape[2:])
        up = F.interpolate(self.up(torch.cat([quarter, up], 1)), half.shape[2:])
        out = self.head(self.join(torch.cat([half, up], 1)))
        return F.interpolate(out, x.shape[2:], mode="bilinear")
