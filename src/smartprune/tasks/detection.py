"""Object detection: images with boxes in COCO's format. The metric is mean average precision."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .boxes import Letterbox, nms, to_centers, to_corners, transform_boxes
from .coco_eval import MEASURE, NEEDS, evaluator, mean_average_precision
from .detection_augment import AugmentSettings, augment_boxes, augment_images, draw
from .detection_files import FOLDERS, GroundTruth, check_detections, folder_of, load_all, load_checked_truth, load_image
from .images import ImageFiles, ImageStore, batch_slices, find_images
from .task import Data, check_split, step_count
from .yolo_loss import GAINS, Gains, yolo_distance, yolo_loss

# Images [batch, 3, size, size] in [0, 1]; class, center, width and height [batch, n, 5], as yolo_loss takes them.
Batch = tuple[Tensor, Tensor]

STRIDE = 32  # pixels per cell of the coarsest map
EVALUATION_BATCH = 32
MAX_CANDIDATES = 8192  # boxes per image before non-maximum suppression
BOX_DECIMALS, SCORE_DECIMALS = 3, 5  # of detections as they are saved and scored


@dataclass(frozen=True)
class Detection:
    """Your own images and boxes, or COCO; see ``detection_files`` for the layouts.

    A named data set is a subclass with other defaults, such as ``bccd`` and ``voc07sub``.
    """

    folder: str = ""  # a folder or a tar file; empty: the environment variable SMARTPRUNE_DATA
    size: int = 640  # side of the network's input in pixels
    mosaic: float = 1.0  # share of training images that are mosaics of four images
    scale: float = 0.5  # training images are scaled up or down by up to this share
    shift: float = 0.1  # training images are shifted by up to this share of a side
    flip: bool = True  # flip half of the training images
    hue: float = 0.015  # largest change of the hue, as a share of a full turn
    saturation: float = 0.7  # largest change of the saturation, as a share
    brightness: float = 0.4  # largest change of the brightness, as a share
    confidence: float = 0.001  # detections with a lower score are dropped
    overlap: float = 0.6  # of two detections of one class that overlap more, the one with the lower score is dropped
    most: int = 300  # largest number of detections per image
    lenient: bool = False  # drop boxes without area or outside of their image instead of raising an error
    memory: float = 8.0  # GB; a larger split is read from disk in every epoch

    name: ClassVar[str] = "detection"
    data_name: ClassVar[str] = "coco"  # folder or tar file in the data folder
    # Paper: SGD with momentum 0.937 and weight decay 5e-4; the rate falls linearly from 1e-4 to 0 over 100 epochs of pruning,
    # and the search takes 35,000 batches of 16 images (about 5 epochs of COCO). It starts from a trained model (pass yours with
    # --dense). The dense stage, the warm-up and EMA follow the recipe of YOLOv5, except that all parameters share one rate in
    # the warm-up. Gradients are accumulated over 64 images, as YOLOv5 does.
    recipe: ClassVar[Recipe] = Recipe(
        model="yolov5m",
        block="16x8",
        sparsity=0.5,
        dense_epochs=300,
        search_epochs=5,
        finetune_epochs=95,
        batch=16,
        accumulate=4,
        lr=0.01,
        search_lr=1e-4,
        finetune_lr=1e-4,
        score_lr=1e-4,
        schedule="linear",
        schedule_over="pruning",
        momentum=0.937,
        weight_decay=5e-4,
        warmup_epochs=3.0,
        ema=0.9999,
        amp="auto",
        checkpoint_seconds=60.0,
    )
    models: ClassVar[tuple[str, ...]] = ("yolov5m",)
    measure: ClassVar[str] = MEASURE
    needs: ClassVar[str] = NEEDS
    distance = staticmethod(yolo_distance)

    def __post_init__(self) -> None:
        if self.size < STRIDE or self.size % STRIDE:
            raise SmartpruneError(f"{self.name}: size={self.size} is not a positive multiple of {STRIDE} pixels")
        for name in ("mosaic", "shift", "saturation", "brightness", "confidence", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise SmartpruneError(f"{self.name}: {name}={getattr(self, name)} is outside 0 to 1")
        for name, limit in (("scale", 1.0), ("hue", 0.5)):
            if not 0 <= getattr(self, name) < limit:
                raise SmartpruneError(f"{self.name}: {name}={getattr(self, name)} is outside [0, {limit:g})")
        if self.most < 1:
            raise SmartpruneError(f"{self.name}: most={self.most} is too small; use at least 1")
        if self.memory < 0:
            raise SmartpruneError(f"{self.name}: memory={self.memory} is negative; use 0 or more")

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=len(self._truth("train").categories))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.size, self.size)

    def data(self, split: str, device: torch.device) -> Data:
        files, folder = self._files(), self._folder_of(split)
        if folder is None:
            return Split(ImageStore(lambda number: torch.empty(0), None, device), GroundTruth("", (), ()), self.size, None)
        truth = self._truth(split)
        truth.require_boxes("train on" if split == "train" else "evaluate")
        cached = None
        if len(truth.images) * self.size**2 * 3 <= self.memory * 1e9:
            cached = load_all(files.path, folder, self.size, self.lenient)
        store = ImageStore(lambda number: load_image(files, truth.images[number], self.size), cached, device)
        augment = AugmentSettings(self.mosaic, self.scale, self.shift, self.flip, self.hue, self.saturation, self.brightness)
        return Split(store, truth, self.size, augment if split == "train" else None)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float | None:
        return metric(self, model, data)

    def predictions(self, model: nn.Module, data: Data) -> list[dict[str, Any]]:
        return predict(model, data, self.confidence, self.overlap, self.most)

    def score(self, predictions: object, split: str) -> dict[str, float] | None:
        truth = self._truth(split)
        return mean_average_precision(truth, check_detections(predictions, truth, "the predictions"))

    def _files(self) -> ImageFiles:
        return find_images(self.name, self.folder, self.data_name, FOLDERS)

    def _folder_of(self, split: str) -> str | None:
        check_split(self.name, split)
        return folder_of(self._files(), split)

    def _truth(self, split: str) -> GroundTruth:
        folder = self._folder_of(split)
        if folder is None:
            raise SmartpruneError(f"{self.name}: {self._files().path} holds no boxes for the split {split}")
        return load_checked_truth(self._files(), folder, self.lenient)


class Split:
    """Letterboxed images with their boxes. Training data, with ``augment``, is shuffled and augmented."""

    def __init__(self, store: ImageStore, truth: GroundTruth, size: int, augment: AugmentSettings | None) -> None:
        self.store, self.truth, self.size, self.augment = store, truth, size, augment
        boxes = [Letterbox(image.width, image.height, size) for image in truth.images]
        self.start = torch.tensor([box.start for box in boxes], dtype=torch.float32).reshape(-1, 2)
        self.scale = torch.tensor([box.scale for box in boxes], dtype=torch.float32).reshape(-1, 2)
        inner = torch.tensor([box.inner for box in boxes], dtype=torch.float32).reshape(-1, 2)
        self.frames = torch.cat([self.start, self.start + inner], 1).to(store.device)  # [n, 4] corners of the image
        self.labels = self._labels().to(store.device)  # [n, most boxes of an image, 5] class and corners, class -1 for none

    def _labels(self) -> Tensor:
        objects = [
            [(label, *box) for box, label, crowd in zip(image.boxes, image.classes, image.crowd, strict=True) if not crowd]
            for image in self.truth.images
        ]
        out = torch.full((len(objects), max(map(len, objects), default=0) or 1, 5), -1.0)
        for labels, rows, scale, start in zip(out, objects, self.scale, self.start, strict=True):
            if rows:
                labels[: len(rows)] = torch.tensor(rows)
                labels[: len(rows), 1:] = transform_boxes(labels[: len(rows), 1:], scale, start)
        return out

    def steps(self, size: int) -> int:
        return step_count(len(self.truth.images), size, self.augment is not None)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, count = batch_slices(size, first, self.steps(size), every), len(self.truth.images)
        if self.augment is None:
            for part, squares in zip(parts, self.store.stream(torch.arange(count), parts), strict=True):
                images = (squares.float() / 255).permute(0, 3, 1, 2)
                yield images, to_targets(self.labels[part])
            return
        draws, tiles = draw(self.augment, count, seed, epoch), self.augment.tiles
        order = draws.order.flatten()
        draws = draws.to(self.store.device)
        tile_parts = [slice(part.start * tiles, part.stop * tiles) for part in parts]
        for part, squares in zip(parts, self.store.stream(order, tile_parts), strict=True):
            batch = draws[part]
            frames, labels = self.frames[batch.order], self.labels[batch.order]
            images = augment_images(squares.unflatten(0, (-1, tiles)), frames, batch)
            yield images, to_targets(augment_boxes(labels, frames, batch, self.size))

    def still(self) -> Split:
        out = copy(self)
        out.augment = None
        return out


def to_targets(labels: Tensor) -> Tensor:
    """Class and corners [..., 5] to class, center, width and height, as the loss takes them."""
    return torch.cat([labels[..., :1], to_centers(labels[..., 1:])], -1)


def loss(model: nn.Module, batch: Batch, gains: Gains = GAINS) -> Tensor:
    """The loss of a model that returns raw maps and holds its anchors as ``detect.anchors``, like ``models.yolov5m``."""
    images, targets = batch
    unwrapped: Any = getattr(model, "module", model)  # of a data-parallel wrapper
    return yolo_loss(model(images), targets, unwrapped.detect.anchors, images.shape[-1], gains)


def metric(task: Any, model: nn.Module, data: Data) -> float | None:
    """mAP, or ``None`` if no evaluator is installed; the model does not run then."""
    if evaluator() is None:
        return None
    assert isinstance(data, Split)
    figures = mean_average_precision(data.truth, task.predictions(model, data))
    return None if figures is None else figures[MEASURE]


def predict(model: nn.Module, data: Data, confidence: float, overlap: float, limit: int) -> list[dict[str, Any]]:
    """The detections of a split in COCO's format: ids of the annotation file, pixels of the original image, best first."""
    assert isinstance(data, Split)
    detector: Any = model
    out: list[dict[str, Any]] = []
    done = 0
    for images, _ in data.batches(EVALUATION_BATCH, seed=0, epoch=0):
        batch = select(detector.decode(detector(images)), confidence, overlap, limit).cpu()
        for number, detections in enumerate(batch, start=done):
            out += to_coco(detections[detections[:, 4] > 0], data, number)
        done += len(images)
    return out


def select(boxes: Tensor, confidence: float, overlap: float, limit: int) -> Tensor:
    """Detections [batch, limit, 6] from decoded boxes [batch, n, 5 + classes]: corners, score (0: none) and class.

    The score is the probability of the class times the objectness. A box is a detection of every class with enough score.
    """
    scores = (boxes[..., 4:5] * boxes[..., 5:]).flatten(1)  # [batch, n * classes]
    enough = scores > confidence
    count = min(MAX_CANDIDATES, int(enough.sum(1).max()))
    if not count:
        return boxes.new_zeros(len(boxes), limit, 6)
    best, index = torch.where(enough, scores, 0).topk(count, 1)
    number, label = index // (boxes.shape[-1] - 5), index % (boxes.shape[-1] - 5)
    corners = to_corners(boxes[..., :4]).gather(1, number[..., None].expand(-1, -1, 4))
    kept = nms(corners, best, label, overlap, limit)
    columns = torch.cat([corners, best[..., None], label[..., None].to(corners.dtype)], -1)
    out = columns.gather(1, kept.clamp(min=0)[..., None].expand(-1, -1, 6))
    return torch.where((kept >= 0)[..., None], out, 0)


def to_coco(detections: Tensor, data: Split, number: int) -> list[dict[str, Any]]:
    """Detections [n, 6] in the letterboxed image ``number``, as COCO entries in pixels of the original image."""
    image = data.truth.images[number]
    corners = transform_boxes(detections[:, :4].double() - data.start[number].repeat(2), 1 / data.scale[number], torch.zeros(2))
    corners = corners.clamp(min=0).minimum(torch.tensor([image.width, image.height] * 2))
    rows = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2], detections[:, 4:]], 1).tolist()
    return [
        {
            "image_id": image.id,
            "category_id": data.truth.categories[int(label)][0],
            "bbox": [round(value, BOX_DECIMALS) for value in box],
            "score": round(score, SCORE_DECIMALS),
        }
        for *box, score, label in rows
    ]
