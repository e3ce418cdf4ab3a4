"""Semantic segmentation: images with masks of class indices. The metric is mean intersection over union."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .distance import soft_distance
from .images import ImageFiles, ImageStore, batch_slices, crop_and_resize, find_images, normalize
from .segmentation_files import (
    FOLDERS,
    IGNORE,
    count_classes,
    folder_of,
    list_pairs,
    load_all,
    load_equal,
    load_pair,
    parse_size,
)
from .task import Data, check_split, generator, step_count

Batch = tuple[Tensor, Tensor]  # images [batch, 3, height, width], classes [batch, height, width] with IGNORE

HARD_BELOW, MIN_HARD = 0.7, 16  # pixels count if their class has a lower probability; at least one in 16 counts
MULTIPLE = 32  # networks halve the image five times, so evaluation pads the sides to a multiple of this
EVALUATION_BATCH = 4


@dataclass(frozen=True)
class Segmentation:
    """Your own images and masks, or Cityscapes; see ``segmentation_files`` for the layouts."""

    folder: str = ""  # a folder or a tar file; empty: the environment variable SMARTPRUNE_DATA
    classes: int = 0  # number of classes; 0: read from the data
    height: int = 512  # size of a training crop
    width: int = 1024
    smallest: float = 0.5  # training images are scaled by a random factor from ``smallest``
    largest: float = 2.0  # to ``largest``
    flip: bool = True  # flip half of the training images
    resize: str = ""  # WIDTHxHEIGHT to resize images and masks to when they are read; empty: original size
    memory: float = 8.0  # GB; a larger split is read from disk in every epoch

    name: ClassVar[str] = "segmentation"
    data_name: ClassVar[str] = "cityscapes"  # folder or tar file in the data folder
    recipe: ClassVar[Recipe] = Recipe(
        model="bisenetv2",
        block="16x8",
        sparsity=0.7,
        dense_epochs=400,
        search_epochs=80,
        finetune_epochs=320,
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
        for name, value in (("height", self.height), ("width", self.width)):
            if value < MULTIPLE or value % MULTIPLE:
                raise SmartpruneError(f"{self.name}: {name}={value} is not a positive multiple of {MULTIPLE} pixels")
        if not 0 < self.smallest <= self.largest:
            raise SmartpruneError(
                f"{self.name}: smallest={self.smallest} and largest={self.largest} are not a range of positive factors; "
                "use 0 < smallest <= largest"
            )
        if self.memory < 0:
            raise SmartpruneError(f"{self.name}: memory={self.memory} is negative; use 0 or more")
        if not 0 <= self.classes < IGNORE:
            raise SmartpruneError(f"{self.name}: classes={self.classes} is outside 0 to {IGNORE - 1}")
        parse_size(self.resize)

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=count_classes(self._files(), self.classes))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.height, self.width)

    def data(self, split: str, device: torch.device) -> Data:
        check_split(self.name, split)
        files, resize = self._files(), parse_size(self.resize)
        folder, classes = folder_of(files, split), count_classes(files, self.classes)
        if folder is None:
            return Split(ImageStore(lambda number: torch.empty(0), None, device), 0, (0, 0), None)
        pairs = list_pairs(files, folder)
        shape = tuple(load_pair(files, pairs[0], classes, resize).shape)
        fits = len(pairs) * math.prod(shape) <= self.memory * 1e9
        cached = load_all(files.path, folder, classes, resize) if fits else None
        store = ImageStore(lambda number: load_equal(files, pairs[number], classes, resize, shape), cached, device)
        crops = Crops(self.height, self.width, self.smallest, self.largest, self.flip)
        return Split(store, len(pairs), (shape[0], shape[1]), crops if split == "train" else None)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float:
        return metric(model, data)

    def _files(self) -> ImageFiles:
        return find_images(self.name, self.folder, self.data_name, FOLDERS)


@dataclass(frozen=True)
class Crops:
    """Random crops of training images: scaled by ``smallest`` to ``largest``, cropped to height x width, and flipped."""

    height: int
    width: int
    smallest: float
    largest: float
    flip: bool


class Split:
    """Images with their masks as a fourth channel. Training data, with ``crops``, is shuffled and cropped."""

    def __init__(self, store: ImageStore, count: int, size: tuple[int, int], crops: Crops | None) -> None:
        self.store, self.count, self.size, self.crops = store, count, size, crops  # size: height, width

    def steps(self, size: int) -> int:
        return step_count(self.count, size, self.crops is not None)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, device = batch_slices(size, first, self.steps(size), every), self.store.device
        if self.crops is None:
            for pixels in self.store.stream(torch.arange(self.count), parts):
                yield pad_to_multiple(normalize(pixels[..., :3]), pixels[..., 3].long())
            return
        order, extent, center = self._draw(self.crops, seed, epoch)
        extent, center = extent.to(device), center.to(device)
        for part, pixels in zip(parts, self.store.stream(order, parts), strict=True):
            yield crop(pixels, extent[part], center[part], (self.crops.height, self.crops.width))

    def still(self) -> Split:
        out = copy(self)
        out.crops = None
        return out

    def _draw(self, crops: Crops, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index of the image [n], and the extent and center of the crop. Drawn on the CPU, so all devices agree."""
        rng = generator(seed, epoch)
        order = torch.randperm(self.count, generator=rng)
        scale = crops.smallest + (crops.largest - crops.smallest) * torch.rand(self.count, 1, generator=rng)
        share = torch.tensor([crops.width / self.size[1], crops.height / self.size[0]])  # of the unscaled image
        extent = share / scale
        center = (1 - extent) * (2 * torch.rand(self.count, 2, generator=rng) - 1)  # for extent > 1 the crop holds the image
        flipped = torch.randint(0, 2, (self.count,), generator=rng) * crops.flip
        extent[:, 0] *= 1 - 2 * flipped
        return order, extent, center


def crop(pixels: Tensor, extent: Tensor, center: Tensor, size: tuple[int, int]) -> Batch:
    """Crops of images (bilinear) and masks (nearest). Outside of the image are the mean color and IGNORE."""
    images = crop_and_resize(normalize(pixels[..., :3]), extent, center, size)
    masks = crop_and_resize(pixels[..., 3].float().sub_(IGNORE)[:, None], extent, center, size, "nearest") + IGNORE
    return images.contiguous(memory_format=torch.channels_last), masks[:, 0].long()


def pad_to_multiple(images: Tensor, masks: Tensor) -> Batch:
    """Pads the right and bottom with the mean color and IGNORE to a multiple of 32 pixels."""
    height, width = masks.shape[1:]
    padding = (0, -width % MULTIPLE, 0, -height % MULTIPLE)
    return F.pad(images, padding), F.pad(masks, padding, value=IGNORE)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the hardest pixels, summed over all heads of the model."""
    images, masks = batch
    output = model(images)
    heads = output if isinstance(output, (tuple, list)) else (output,)
    return torch.stack([hard_pixel_loss(upsample(head, masks), masks) for head in heads]).sum()


def hard_pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy of pixels whose class has a probability below 0.7, and at least of the hardest sixteenth.

    Nothing here synchronizes with the device, so the step can be captured in a CUDA graph.
    """
    losses = F.cross_entropy(logits, masks, ignore_index=IGNORE, reduction="none").flatten()
    counted = (masks != IGNORE).flatten()
    with torch.no_grad():
        worst = torch.where(counted, losses, -1).topk(max(1, len(losses) // MIN_HARD)).values
        last = (counted.sum() // MIN_HARD - 1).clamp_(min=0, max=len(worst) - 1)
        bound = worst.gather(0, last[None])[0].clamp(max=-math.log(HARD_BELOW))
        hard = counted & (losses >= bound)
    return torch.where(hard, losses, 0).sum() / hard.sum().clamp(min=1)


def upsample(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits at the size of the masks."""
    if logits.shape[2:] == masks.shape[1:]:
        return logits
    return F.interpolate(logits, masks.shape[1:], mode="bilinear")


def metric(model: nn.Module, data: Data) -> float:
    """Mean intersection over union over all images together."""
    table: Any = 0
    for images, masks in data.batches(EVALUATION_BATCH, seed=0, epoch=0):
        output = model(images)
        logits = upsample(output[0] if isinstance(output, (tuple, list)) else output, masks)
        table = table + confusion(logits.argmax(1), masks, logits.shape[1])
    return mean_iou(table)


def confusion(predictions: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Number of pixels [classes, classes] by true class (rows) and predicted class (columns)."""
    cells = torch.where(masks == IGNORE, classes * classes, masks * classes + predictions)
    return torch.bincount(cells.flatten(), minlength=classes * classes + 1)[:-1].reshape(classes, classes)


def mean_iou(table: Tensor) -> float:
    """Mean over the classes that occur in the masks or the predictions."""
    intersection = table.diagonal().double()
    union = table.sum(0) + table.sum(1) - intersection
    return float((intersection / union)[union > 0].mean()) if bool((union > 0).any()) else 0.0
