"""Pictures in one folder per class, as ImageNet is laid out: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, also in a tar."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SmartpruneError
from ..models import build
from ..recipe import Recipe
from .distance import soft_distance
from .pictures import SUFFIXES, Files, Shelf, cut, decoded, find, normalised, opened, slices
from .task import Data, generator

Batch = tuple[Tensor, Tensor]  # pictures [batch, 3, size, size] in channels_last, labels [batch]
Index = tuple[tuple[str, ...], tuple[int, ...]]  # names of the pictures, and the class of each

PARTS = ("train", "val")
KNOWN = "imagenette128"  # looked for in the data folder
EVALUATE = 100  # pictures per step of an evaluation


@dataclass(frozen=True)
class ImageFolder:
    """What is in the picture? Judged by accuracy (top-1). Classes are the folders of ``train``, in alphabetical order.

    The test split is ``val``. With ``holdout``, so many pictures of every class of ``train`` are the validation split.
    """

    folder: str = ""  # a folder or a tar; else the environment variable SMARTPRUNE_DATA says it
    size: int = 128  # pixels a side that the network sees
    side: int = 0  # pixels of the shorter side that pictures are brought to when they are read; 0: as ``size``
    holdout: int = 0
    limit: int = 0  # only the first so many pictures of every class; 0 is all of them
    area: float = 0.25  # a training picture is cut out of a random part of at least this share
    flip: bool = True  # half of the training pictures are mirrored
    memory: float = 8.0  # GB; a split that needs more is read from disk in every epoch

    recipe: ClassVar[Recipe] = Recipe(
        model="resnet50",
        block="16x8",
        sparsity=0.7,
        dense_epochs=90,
        search_epochs=20,
        finetune_epochs=60,
        batch=64,
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
    models: ClassVar[tuple[str, ...]] = ("resnet50", "resnet18", "densenet", "googlenet", "mobilenetv2", "resnet8")
    measure: ClassVar[str] = "accuracy"
    distance = staticmethod(soft_distance)

    def __post_init__(self) -> None:
        for name in ("side", "holdout", "limit", "memory"):
            if getattr(self, name) < 0:
                raise SmartpruneError(f"imagefolder: {name}={getattr(self, name)} should not be negative")
        if self.size < 8:
            raise SmartpruneError(f"imagefolder: size={self.size} should be at least 8 pixels")
        if self.side and self.side < self.size:
            raise SmartpruneError(f"imagefolder: side={self.side} should be at least size={self.size}, or 0")
        if not 0 < self.area <= 1:
            raise SmartpruneError(f"imagefolder: area={self.area} should be above 0 and at most 1")

    def model(self, name: str) -> nn.Module:
        count = len(classes(self._files()))
        if name == "resnet8":  # takes grey pictures unless told
            return build(name, num_classes=count, in_channels=3)
        return build(name, num_classes=count)

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.size, self.size)

    def data(self, split: str, device: torch.device) -> Data:
        if split not in ("train", "validation", "test"):
            raise SmartpruneError(f"imagefolder: split={split!r}; it is train, validation or test")
        files, side, training = self._files(), self.side or self.size, split == "train"
        names, labels = index(files, "val" if split == "test" else "train", self.limit)
        if split != "test":
            names, labels = held(names, labels, self.holdout, split == "validation")
        kept = None
        if names and len(names) * side * side * 3 <= self.memory * 1e9:
            kept = everything(files.place, names, side)
        shelf = Shelf(lambda number: load(files, names[number], side), kept, device)
        return Split(shelf, torch.tensor(labels, dtype=torch.int64), training, self.size, self.area, self.flip)

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

    def _files(self) -> Files:
        return find("imagefolder", self.folder, KNOWN, PARTS)


class Split:
    """Pictures on the device, or on disk. Training data is shuffled, cut out, mirrored, and drops a short last batch."""

    def __init__(self, shelf: Shelf, labels: Tensor, training: bool, size: int, area: float, flip: bool) -> None:
        self.shelf, self.labels, self.training = shelf, labels, training
        self.size, self.area, self.flip = size, area, flip

    def steps(self, size: int) -> int:
        return max(1, len(self.labels) // size) if self.training else -(-len(self.labels) // size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, device = slices(size, first, self.steps(size), every), self.shelf.device
        if not self.training:
            labels = self.labels.to(device)
            for part, pictures in zip(parts, self.shelf.stream(torch.arange(len(labels)), parts), strict=True):
                yield normalised(middle(pictures, self.size)), labels[part]
            return
        order, reach, centre = self._draw(seed, epoch)
        labels, reach, centre = self.labels[order].to(device), reach.to(device), centre.to(device)
        for part, pictures in zip(parts, self.shelf.stream(order, parts), strict=True):
            out = cut(normalised(pictures), reach[part], centre[part], (self.size, self.size))
            yield out.contiguous(memory_format=torch.channels_last), labels[part]

    def still(self) -> Split:
        out = copy(self)
        out.training = False
        return out

    def _draw(self, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which picture [n], and the rectangle to take of it (see ``cut``): drawn on the CPU for every device alike."""
        draw, count = generator(seed, epoch), len(self.labels)
        order = torch.randperm(count, generator=draw)
        area = self.area + (1 - self.area) * torch.rand(count, generator=draw)
        ratio = (4 / 3) ** (2 * torch.rand(count, generator=draw) - 1)  # width by height, 3/4 to 4/3
        reach = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp_(max=1)
        centre = (1 - reach) * (2 * torch.rand(count, 2, generator=draw) - 1)
        mirrored = torch.randint(0, 2, (count,), generator=draw) * self.flip
        reach[:, 0] *= 1 - 2 * mirrored
        return order, reach, centre


def middle(pictures: Tensor, size: int) -> Tensor:
    start = (pictures.shape[1] - size) // 2
    return pictures[:, start : start + size, start : start + size]


@lru_cache(maxsize=4)
def classes(files: Files) -> tuple[str, ...]:
    """Names of the classes: the folders of ``train`` that hold a picture."""
    names = sorted({name.split("/")[1] for name in files.names("train") if name.count("/") > 1})
    if not names:
        raise SmartpruneError(
            f"{files.where('train')} is missing or holds no folders with pictures; the layout is train/CLASS/*.jpg"
        )
    return tuple(names)


@lru_cache(maxsize=4)
def index(files: Files, part: str, limit: int) -> Index:
    """The pictures of ``train`` or ``val``, class by class; every class must have some."""
    known = classes(files)
    by_class: dict[str, list[str]] = {name: [] for name in known}
    listed = files.names(part)
    if not listed:
        raise SmartpruneError(f"{files.where(part)} is missing or empty; the layout is {part}/CLASS/*.jpg")
    for name in listed:
        folder = name.split("/")[1]
        if name.count("/") < 2 or not name.lower().endswith(SUFFIXES):
            continue
        if folder not in by_class:
            raise SmartpruneError(f"{files.where(f'{part}/{folder}')} is a class that train lacks; train has: {_some(known)}")
        by_class[folder].append(name)
    empty = [name for name in known if not by_class[name]]
    if not files.packed:
        folders = (p.name for p in (files.place / part).iterdir() if p.is_dir() and not p.name.startswith("."))
        empty += sorted(name for name in folders if name not in by_class)
    if empty:
        raise SmartpruneError(f"{files.where(f'{part}/{empty[0]}')} holds no pictures ({', '.join(SUFFIXES)})")
    pairs = [(name, label) for label, names in enumerate(by_class.values()) for name in names[: limit or None]]
    return tuple(name for name, _ in pairs), tuple(label for _, label in pairs)


def held(names: tuple[str, ...], labels: tuple[int, ...], holdout: int, out: bool) -> Index:
    """Without ``holdout`` pictures of every class, which are chosen at random once and for all; or only these."""
    chosen: set[int] = set()
    for label in sorted(set(labels)) if holdout else ():
        own = [i for i, other in enumerate(labels) if other == label]
        if holdout >= len(own):
            name = names[own[0]].rpartition("/")[0]
            raise SmartpruneError(f"imagefolder: holdout={holdout} leaves none of the {len(own)} pictures of {name} to train on")
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(label))
        chosen |= {own[i] for i in order[:holdout].tolist()}
    left = [i for i in range(len(names)) if (i in chosen) == out]
    return tuple(names[i] for i in left), tuple(labels[i] for i in left)


@lru_cache(maxsize=3)
def everything(place: Path, names: tuple[str, ...], side: int) -> Tensor:
    files = opened(place, PARTS)
    return decoded(lambda number: load(files, names[number], side), len(names))


def load(files: Files, name: str, side: int) -> Tensor:
    """One picture [side, side, 3]: its shorter side brought to ``side``, then the middle of the longer one."""
    image = files.colours(name, least=side)
    short = min(image.size)
    if short != side:
        image = image.resize([max(side, round(length * side / short)) for length in image.size], resample=3)  # bicubic
    left, top = ((length - side) // 2 for length in image.size)
    return torch.from_numpy(np.array(image.crop((left, top, left + side, top + side))))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
