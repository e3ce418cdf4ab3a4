"""Which class does every pixel belong to? Pictures with masks of class numbers, judged by mean intersection over union."""

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
from . import segmentation_files as on_disk
from .distance import soft_distance
from .pictures import Files, Shelf, cut, find, normalised, slices
from .segmentation_files import IGNORE
from .task import Data, generator

Batch = tuple[Tensor, Tensor]  # pictures [batch, 3, height, width], classes [batch, height, width] with IGNORE

HARD, LEAST = 0.7, 16  # a pixel counts if its class has less than this probability; at least one of so many counts
MULTIPLE = 32  # what networks halve five times: sides are filled up to a multiple of it in an evaluation
EVALUATE = 4  # pictures per step of an evaluation


@dataclass(frozen=True)
class Segmentation:
    """Pictures and masks of your own or of Cityscapes; see ``segmentation_files`` for the layouts."""

    folder: str = ""  # a folder or a tar; else the environment variable SMARTPRUNE_DATA says it
    classes: int = 0  # 0: found from the data
    height: int = 512  # of what is cut out for training
    width: int = 1024
    smallest: float = 0.5  # training pictures are scaled at random by this ...
    largest: float = 2.0  # ... to this
    flip: bool = True  # half of the training pictures are mirrored
    resize: str = ""  # WIDTHxHEIGHT that pictures and masks are brought to when they are read; empty: as they are
    memory: float = 8.0  # GB; a split that needs more is read from disk in every epoch

    name: ClassVar[str] = "segmentation"
    known: ClassVar[str] = "cityscapes"  # what a data folder calls it
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
        check(self.name, self.height, self.width, self.smallest, self.largest)
        if self.memory < 0:
            raise SmartpruneError(f"{self.name}: memory={self.memory} should not be negative")
        if not 0 <= self.classes < IGNORE:
            raise SmartpruneError(f"{self.name}: classes={self.classes} should be 0 to {IGNORE - 1}")
        on_disk.side(self.resize)

    def model(self, name: str) -> nn.Module:
        return build(name, num_classes=on_disk.classes(self._files(), self.classes))

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.height, self.width)

    def data(self, split: str, device: torch.device) -> Data:
        moves = Moves(self.height, self.width, self.smallest, self.largest, self.flip)
        return from_disk(self._files(), self.classes, split, device, moves, on_disk.side(self.resize), self.memory)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return loss(model, batch)

    def metric(self, model: nn.Module, data: Data) -> float:
        return metric(model, data)

    def _files(self) -> Files:
        return find(self.name, self.folder, self.known, on_disk.WITHIN)


@dataclass(frozen=True)
class Moves:
    """How a training picture is changed: scaled by ``smallest`` to ``largest``, cut to height x width, mirrored."""

    height: int
    width: int
    smallest: float
    largest: float
    flip: bool


class Split:
    """Pictures with their masks as a fourth channel. Training data is shuffled and moved, and drops a short last batch."""

    def __init__(self, shelf: Shelf, count: int, size: tuple[int, int], moves: Moves | None) -> None:
        self.shelf, self.count, self.size, self.moves = shelf, count, size, moves  # size: height, width

    def steps(self, size: int) -> int:
        return max(1, self.count // size) if self.moves else -(-self.count // size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, device = slices(size, first, self.steps(size), every), self.shelf.device
        if self.moves is None:
            for taken in self.shelf.stream(torch.arange(self.count), parts):
                yield filled_up(normalised(taken[..., :3]), taken[..., 3].long())
            return
        order, reach, centre = self._draw(self.moves, seed, epoch)
        reach, centre = reach.to(device), centre.to(device)
        for part, taken in zip(parts, self.shelf.stream(order, parts), strict=True):
            yield moved(taken, reach[part], centre[part], (self.moves.height, self.moves.width))

    def still(self) -> Split:
        out = copy(self)
        out.moves = None
        return out

    def _draw(self, moves: Moves, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which picture [n], and the rectangle to take of it (see ``cut``): drawn on the CPU for every device alike."""
        draw = generator(seed, epoch)
        order = torch.randperm(self.count, generator=draw)
        scale = moves.smallest + (moves.largest - moves.smallest) * torch.rand(self.count, 1, generator=draw)
        share = torch.tensor([moves.width / self.size[1], moves.height / self.size[0]])  # of the picture as it is
        reach = share / scale
        centre = (1 - reach) * (2 * torch.rand(self.count, 2, generator=draw) - 1)  # beyond 1: the picture lies within
        mirrored = torch.randint(0, 2, (self.count,), generator=draw) * moves.flip
        reach[:, 0] *= 1 - 2 * mirrored
        return order, reach, centre


def moved(taken: Tensor, reach: Tensor, centre: Tensor, size: tuple[int, int]) -> Batch:
    """Pictures are interpolated and masks are not; beyond the picture is the mean colour, and no class."""
    pictures = cut(normalised(taken[..., :3]), reach, centre, size)
    masks = cut(taken[..., 3].float().sub_(IGNORE)[:, None], reach, centre, size, "nearest") + IGNORE
    return pictures.contiguous(memory_format=torch.channels_last), masks[:, 0].long()


def filled_up(pictures: Tensor, masks: Tensor) -> Batch:
    """Right and below with the mean colour and no class, to a multiple of 32 pixels."""
    height, width = masks.shape[1:]
    more = (0, -width % MULTIPLE, 0, -height % MULTIPLE)
    return F.pad(pictures, more), F.pad(masks, more, value=IGNORE)


def from_disk(
    files: Files, classes: int, split: str, device: torch.device, moves: Moves, resize: tuple[int, int] | None, memory: float
) -> Split:
    """A split of the pictures in ``files``; one that is not there is empty."""
    if split not in ("train", "validation", "test"):
        raise SmartpruneError(f"segmentation: split={split!r}; it is train, validation or test")
    folder, count = on_disk.part(files, split), on_disk.classes(files, classes)
    if folder is None:
        return Split(Shelf(lambda number: torch.empty(0), None, device), 0, (0, 0), None)
    listed = on_disk.pairs(files, folder)
    shape = tuple(on_disk.load(files, listed[0], count, resize).shape)
    fits = len(listed) * math.prod(shape) <= memory * 1e9
    kept = on_disk.everything(files.place, folder, count, resize) if fits else None
    shelf = Shelf(lambda number: on_disk.alike(files, listed[number], count, resize, shape), kept, device)
    return Split(shelf, len(listed), (shape[0], shape[1]), moves if split == "train" else None)


def check(task: str, height: int, width: int, smallest: float, largest: float) -> None:
    for name, value in (("height", height), ("width", width)):
        if value < MULTIPLE or value % MULTIPLE:
            raise SmartpruneError(f"{task}: {name}={value} should be a multiple of {MULTIPLE} pixels")
    if not 0 < smallest <= largest:
        raise SmartpruneError(f"{task}: smallest={smallest} and largest={largest} should be above 0 and in this order")


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the hardest pixels, summed over the heads of a model that has more than one in training."""
    pictures, masks = batch
    out = model(pictures)
    heads = out if isinstance(out, (tuple, list)) else (out,)
    return torch.stack([hardest(fitted(head, masks), masks) for head in heads]).sum()


def hardest(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy of the pixels whose class has a probability below 0.7, and at least of the worst sixteenth.

    Nothing here waits for the device, so the step can be recorded.
    """
    each = F.cross_entropy(logits, masks, ignore_index=IGNORE, reduction="none").flatten()
    counted = (masks != IGNORE).flatten()
    with torch.no_grad():
        worst = torch.where(counted, each, -1).topk(max(1, len(each) // LEAST)).values
        last = (counted.sum() // LEAST - 1).clamp_(min=0, max=len(worst) - 1)
        bound = worst.gather(0, last[None])[0].clamp(max=-math.log(HARD))
        chosen = counted & (each >= bound)
    return torch.where(chosen, each, 0).sum() / chosen.sum().clamp(min=1)


def fitted(logits: Tensor, masks: Tensor) -> Tensor:
    """Brought to the size of the masks."""
    if logits.shape[2:] == masks.shape[1:]:
        return logits
    return F.interpolate(logits, masks.shape[1:], mode="bilinear")


def metric(model: nn.Module, data: Data) -> float:
    """Mean over the classes of intersection over union, all pictures together."""
    table: Any = 0
    for pictures, masks in data.batches(EVALUATE, seed=0, epoch=0):
        out = model(pictures)
        logits = fitted(out[0] if isinstance(out, (tuple, list)) else out, masks)
        table = table + confusion(logits.argmax(1), masks, logits.shape[1])
    return mean_iou(table)


def confusion(found: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Number of pixels [classes, classes] by their class (rows) and the class found (columns)."""
    cells = torch.where(masks == IGNORE, classes * classes, masks * classes + found)
    return torch.bincount(cells.flatten(), minlength=classes * classes + 1)[:-1].reshape(classes, classes)


def mean_iou(table: Tensor) -> float:
    """Over the classes that are there or were found; the others have no value."""
    both = table.diagonal().double()
    either = table.sum(0) + table.sum(1) - both
    return float((both / either)[either > 0].mean()) if bool((either > 0).any()) else 0.0
