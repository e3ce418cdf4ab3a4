"""Scenes of handwritten digits with masks: segmentation without a download, in about a minute on a CPU."""

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
from .images import ImageStore
from .segmentation import Batch, Crops, Split, loss, metric
from .task import Data, check_split

SIDE, CLASSES = 64, 11  # class 0 is the background, class d + 1 is digit d
SCENES = {"train": 480, "validation": 120, "test": 240}
INK = 0.35  # a pixel belongs to a digit if its share of ink is larger


@dataclass(frozen=True)
class Scenes:
    """Segmentation of digits. The splits use the digits of the same splits of the task ``digits``, so no digit is in two of
    them."""

    data_seed: int = 0  # seed of the scenes
    width: int = 16  # channels of the first layer of segnet

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
        for name, least in (("width", 1), ("data_seed", 0)):
            if getattr(self, name) < least:
                raise SmartpruneError(f"scenes: {name}={getattr(self, name)} is too small; use at least {least}")

    def model(self, name: str) -> nn.Module:
        return SegNet(self.width) if name == "segnet" else build(name, num_classes=CLASSES)

    def example(self) -> Tensor:
        return torch.zeros(1, 3, SIDE, SIDE)

    def data(self, split: str, device: torch.device) -> Data:
        scenes = compose(split, self.data_seed)
        crops = Crops(SIDE, SIDE, smallest=0.9, largest=1.2, flip=False) if split == "train" else None
        return Split(ImageStore(lambda number: scenes[number], scenes, device), len(scenes), (SIDE, SIDE), crops)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float:
        return metric(model, data)


@lru_cache(maxsize=3)
def compose(split: str, seed: int) -> Tensor:
    """Scenes and masks of a split as bytes [n, 64, 64, 4]. A scene depends only on the seed and its index."""
    check_split("scenes", split)
    images, labels = load(split)
    ink = (images * STD + MEAN).clamp_(0, 16) / 16
    return torch.stack([scene(ink, labels, (seed, list(SCENES).index(split), number)) for number in range(SCENES[split])])


def scene(ink: Tensor, labels: Tensor, seed: tuple[int, ...]) -> Tensor:
    """Two to four digits of 20 to 32 pixels with random colors, each in its own quarter, on a smooth background."""
    rng = np.random.default_rng(seed)
    corners = torch.from_numpy(rng.uniform(0, 110, (1, 3, 3, 3))).float()
    image = F.interpolate(corners, (SIDE, SIDE), mode="bilinear")[0] + torch.from_numpy(rng.normal(0, 8, (3, SIDE, SIDE))).float()
    mask = torch.zeros(SIDE, SIDE)
    for quarter in rng.permutation(4)[: rng.integers(2, 5)].tolist():
        index, size = int(rng.integers(len(ink))), int(rng.integers(20, 33))
        top, left = (cell * SIDE // 2 + int(rng.integers(SIDE // 2 - size + 1)) for cell in divmod(quarter, 2))
        color = torch.from_numpy(rng.uniform(140, 255, (3, 1, 1))).float()
        digit = F.interpolate(ink[index][None], (size, size), mode="bilinear")[0]
        at = (slice(top, top + size), slice(left, left + size))
        image[:, *at] = image[:, *at] * (1 - digit) + color * digit
        mask[at] = torch.where(digit[0] > INK, labels[index] + 1.0, mask[at])
    return torch.cat([image, mask[None]]).clamp_(0, 255).round_().to(torch.uint8).permute(1, 2, 0).contiguous()


def conv_bn_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class SegNet(nn.Module):
    """A small U-Net: down to an eighth of the resolution, then up to half of it, with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stage1 = conv_bn_relu(3, width, 2)
        self.stage2 = nn.Sequential(conv_bn_relu(width, 2 * width, 2), conv_bn_relu(2 * width, 2 * width))
        stage3 = conv_bn_relu(2 * width, 4 * width, 2), conv_bn_relu(4 * width, 4 * width), conv_bn_relu(4 * width, 2 * width)
        self.stage3 = nn.Sequential(*stage3)
        self.up = conv_bn_relu(4 * width, width)
        self.join = conv_bn_relu(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        half: Tensor = self.stage1(x)
        quarter: Tensor = self.stage2(half)
        up = F.interpolate(self.stage3(quarter), quarter.shape[2:])
        up = F.interpolate(self.up(torch.cat([quarter, up], 1)), half.shape[2:])
        out = self.head(self.join(torch.cat([half, up], 1)))
        return F.interpolate(out, x.shape[2:], mode="bilinear")
