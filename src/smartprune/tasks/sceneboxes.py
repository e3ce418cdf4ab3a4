"""Scenes of handwritten digits with boxes: detection without a download, in about a minute on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..models.yolov5m import Detect, Maps, YOLOv5
from ..recipe import Recipe
from .coco_eval import MEASURE, NEEDS, mean_average_precision
from .detection import Batch, Split, loss, metric, predict
from .detection_augment import AugmentSettings
from .detection_files import AnnotatedImage, Corners, GroundTruth, check_detections
from .images import ImageStore
from .scenes import SIDE, compose, conv_bn_relu
from .task import Data
from .yolo_loss import yolo_distance

GAINS = (0.1, 4.0, 4.0)  # the gains of YOLOv5 are for images ten times as large and eight times as many classes
DIGITS = tuple((digit, str(digit)) for digit in range(10))


@dataclass(frozen=True)
class SceneBoxes:
    """Detection of digits in the images of the task ``scenes``."""

    data_seed: int = 0  # seed of the scenes
    width: int = 12  # channels of the first layer of boxnet

    recipe: ClassVar[Recipe] = Recipe(
        model="boxnet",
        block="8x4",
        sparsity=0.8,
        dense_epochs=20,
        search_epochs=12,
        finetune_epochs=12,
        batch=16,
        lr=0.025,
        search_lr=0.025,
        finetune_lr=0.025,
        score_lr=0.025,
        momentum=0.9,
        weight_decay=1e-4,
        threads=1,
    )
    models: ClassVar[tuple[str, ...]] = ("boxnet", "yolov5m")
    measure: ClassVar[str] = MEASURE
    needs: ClassVar[str] = NEEDS
    distance = staticmethod(yolo_distance)

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("data_seed", 0)):
            if getattr(self, name) < least:
                raise SmartpruneError(f"sceneboxes: {name}={getattr(self, name)} is too small; use at least {least}")

    def model(self, name: str) -> nn.Module:
        return BoxNet(self.width) if name == "boxnet" else build(name, num_classes=len(DIGITS))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, SIDE, SIDE)

    def data(self, split: str, device: torch.device) -> Data:
        images = compose(split, self.data_seed)[..., :3]
        augment = AugmentSettings(mosaic=0.0, scale=0.1, shift=0.1, flip=False) if split == "train" else None
        store = ImageStore(lambda number: images[number], images, device)
        return Split(store, ground_truth(split, self.data_seed), SIDE, augment)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch, GAINS)

    def metric(self, model: nn.Module, data: Data) -> float | None:
        return metric(self, model, data)

    def predictions(self, model: nn.Module, data: Data) -> list[dict[str, Any]]:
        return predict(model, data, confidence=0.01, overlap=0.6, limit=20)

    def score(self, predictions: object, split: str) -> dict[str, float] | None:
        truth = ground_truth(split, self.data_seed)
        return mean_average_precision(truth, check_detections(predictions, truth, "the predictions"))


@lru_cache(maxsize=3)
def ground_truth(split: str, seed: int) -> GroundTruth:
    """One box around the digit of every quarter that holds one."""
    images = []
    for number, mask in enumerate(compose(split, seed)[..., 3]):
        boxes: list[Corners] = []
        classes = []
        for row in (0, SIDE // 2):
            for column in (0, SIDE // 2):
                quarter = mask[row : row + SIDE // 2, column : column + SIDE // 2]
                y, x = quarter.nonzero(as_tuple=True)
                if len(x):
                    left, top, right, bottom = (int(v) for v in (x.min(), y.min(), x.max(), y.max()))
                    boxes.append((float(column + left), float(row + top), column + right + 1.0, row + bottom + 1.0))
                    classes.append(int(quarter[y[0], x[0]]) - 1)
        areas = tuple((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes)
        name = f"{split}/{number}"
        images.append(AnnotatedImage(number, name, SIDE, SIDE, tuple(boxes), tuple(classes), areas, (False,) * len(boxes)))
    return GroundTruth(f"sceneboxes: {split}", tuple(images), DIGITS)


class BoxNet(nn.Module):
    """Seven convolutions with outputs at 1/8, 1/16 and 1/32 of the resolution, and the detection head of YOLOv5."""

    smartprune_skip: ClassVar[tuple[str, ...]] = ("detect.*",)

    def __init__(self, width: int) -> None:
        super().__init__()
        quarter = (conv_bn_relu(3, width, 2), conv_bn_relu(width, 2 * width, 2), conv_bn_relu(2 * width, 2 * width))
        self.fine = nn.Sequential(*quarter, conv_bn_relu(2 * width, 3 * width, 2), conv_bn_relu(3 * width, 3 * width))
        self.middle = conv_bn_relu(3 * width, 4 * width, 2)
        self.coarse = conv_bn_relu(4 * width, 4 * width, 2)
        self.detect = Detect((3 * width, 4 * width, 4 * width), len(DIGITS))

    def forward(self, x: Tensor) -> Maps:
        fine: Tensor = self.fine(x)
        middle: Tensor = self.middle(fine)
        return self.detect(fine, middle, self.coarse(middle))  # type: ignore[no-any-return]

    def decode(self, maps: Sequence[Tensor]) -> Tensor:
        return YOLOv5.decode(self, maps)  # type: ignore[arg-type]  # decode uses only the head
