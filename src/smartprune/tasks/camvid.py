"""CamVid: 701 road scenes of 480x360 pixels with masks of eleven classes, from a folder or ``camvid.tar``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config import Recipe
from ..distill import soft_distance
from ..models import build
from . import segmentation_files as on_disk
from .pictures import Files, find
from .segmentation import Batch, Moves, check, from_disk, loss, metric
from .task import Data


@dataclass(frozen=True)
class Camvid:
    """Which of eleven classes does every pixel belong to? ``val`` is to choose by, results are those of ``test``."""

    folder: str = ""  # a folder or a tar; else the environment variable SMARTPRUNE_DATA says it
    height: int = 352  # of what is cut out for training
    width: int = 480
    smallest: float = 0.5  # training pictures are scaled at random by this ...
    largest: float = 2.0  # ... to this
    flip: bool = True  # half of the training pictures are mirrored

    recipe: ClassVar[Recipe] = Recipe(
        model="bisenetv2",
        block="16x8",
        sparsity=0.7,
        dense_epochs=240,
        search_epochs=60,
        finetune_epochs=180,
        batch=16,
        lr=0.05,
        search_lr=0.01,
        finetune_lr=0.01,
        score_lr=0.01,
        momentum=0.9,
        weight_decay=5e-4,
        schedule_over="pruning",
        amp="auto",
        checkpoint_seconds=60.0,
    )
    models: ClassVar[tuple[str, ...]] = ("bisenetv2",)
    measure: ClassVar[str] = "mIoU"
    distance = staticmethod(soft_distance)

    def __post_init__(self) -> None:
        check("camvid", self.height, self.width, self.smallest, self.largest)

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=on_disk.classes(self._files(), 0))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.height, self.width)

    def data(self, split: str, device: torch.device) -> Data:
        moves = Moves(self.height, self.width, self.smallest, self.largest, self.flip)
        return from_disk(self._files(), 0, split, device, moves, resize=None, memory=8)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float:
        return metric(model, data)

    def _files(self) -> Files:
        return find("camvid", self.folder, "camvid", on_disk.WITHIN)
