"""Images in one folder per class, like ImageNet: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``, in a folder or a tar file."""

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
from ..files import FREE_BYTES
from ..models import build
from ..recipe import Recipe
from .distance import soft_distance
from .images import (
    SUFFIXES,
    ImageFiles,
    ImageStore,
    batch_slices,
    crop_and_resize,
    decode_all,
    find_images,
    normalize,
    open_images,
)
from .task import Data, accuracy, check_split, generator, step_count

Batch = tuple[Tensor, Tensor]  # images [batch, 3, size, size] in channels_last, labels [batch]
Index = tuple[tuple[str, ...], tuple[int, ...]]  # names of the images, and the class of each

FOLDERS = ("train", "val")
DATA_NAME = "imagenette128"  # folder or tar file in the data folder
EVALUATION_BATCH = 100


@dataclass(frozen=True)
class ImageFolder:
    """Classification of images. The metric is top-1 accuracy. Classes are the folders of ``train`` in alphabetical order.

    The test split is ``val``. The validation split is ``holdout`` images of each class of ``train``.
    """

    folder: str = ""  # a folder or a tar file; empty: the environment variable SMARTPRUNE_DATA
    size: int = 128  # side of the network's input in pixels
    side: int = 0  # images are resized to this shorter side when they are read; 0: ``size``
    holdout: int = 0
    limit: int = 0  # number of images per class to use; 0: all
    area: float = 0.25  # smallest share of an image that a random training crop covers
    flip: bool = True  # flip half of the training images
    memory: float = 8.0  # GB; a larger split is read from disk in every epoch

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
                raise SmartpruneError(f"imagefolder: {name}={getattr(self, name)} is negative; use 0 or more")
        if self.size < 8:
            raise SmartpruneError(f"imagefolder: size={self.size} is too small; use at least 8 pixels")
        if self.side and self.side < self.size:
            raise SmartpruneError(f"imagefolder: side={self.side} is smaller than size={self.size}; use at least size, or 0")
        if not 0 < self.area <= 1:
            raise SmartpruneError(f"imagefolder: area={self.area} is outside (0, 1]")

    def model(self, name: str) -> nn.Module:
        count = len(classes(self._files()))
        if name == "resnet8":  # its default is one channel
            return build(name, num_classes=count, in_channels=3)
        return build(name, num_classes=count)

    def example(self) -> Tensor:
        return torch.zeros(1, 3, self.size, self.size)

    def data(self, split: str, device: torch.device) -> Data:
        check_split("imagefolder", split)
        files, side, training = self._files(), self.side or self.size, split == "train"
        names, labels = list_images(files, "val" if split == "test" else "train", self.limit)
        if split != "test":
            names, labels = hold_out(names, labels, self.holdout, split == "validation")
        cached = None
        if names and len(names) * side * side * 3 <= self.memory * 1e9:
            cached = load_all(files.path, names, side)
        store = ImageStore(lambda number: load(files, names[number], side), cached, device)
        return Split(store, torch.tensor(labels, dtype=torch.int64), training, self.size, self.area, self.flip)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metric(self, model: nn.Module, data: Data) -> float:
        return accuracy(model, data, EVALUATION_BATCH)

    def _files(self) -> ImageFiles:
        return find_images("imagefolder", self.folder, DATA_NAME, FOLDERS)


class Split:
    """Images in memory or on disk. Training data is shuffled, cropped and flipped."""

    def __init__(self, store: ImageStore, labels: Tensor, training: bool, size: int, area: float, flip: bool) -> None:
        self.store, self.labels, self.training = store, labels, training
        self.size, self.area, self.flip = size, area, flip

    def steps(self, size: int) -> int:
        return step_count(len(self.labels), size, self.training)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Batch]:
        parts, device = batch_slices(size, first, self.steps(size), every), self.store.device
        if not self.training:
            labels = self.labels.to(device)
            for part, images in zip(parts, self.store.stream(torch.arange(len(labels)), parts), strict=True):
                yield normalize(center_crop(images, self.size)), labels[part]
            return
        order, extent, center = self._draw(seed, epoch)
        labels, extent, center = self.labels[order].to(device), extent.to(device), center.to(device)
        for part, images in zip(parts, self.store.stream(order, parts), strict=True):
            out = crop_and_resize(normalize(images), extent[part], center[part], (self.size, self.size))
            yield out.contiguous(memory_format=torch.channels_last), labels[part]

    def still(self) -> Split:
        out = copy(self)
        out.training = False
        return out

    def _draw(self, seed: int, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Index of the image [n], and the extent and center of the crop. Drawn on the CPU, so all devices agree."""
        rng, count = generator(seed, epoch), len(self.labels)
        order = torch.randperm(count, generator=rng)
        area = self.area + (1 - self.area) * torch.rand(count, generator=rng)
        ratio = (4 / 3) ** (2 * torch.rand(count, generator=rng) - 1)  # aspect ratio, 3/4 to 4/3
        extent = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp_(max=1)
        center = (1 - extent) * (2 * torch.rand(count, 2, generator=rng) - 1)
        flipped = torch.randint(0, 2, (count,), generator=rng) * self.flip
        extent[:, 0] *= 1 - 2 * flipped
        return order, extent, center


def center_crop(images: Tensor, size: int) -> Tensor:
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]


@lru_cache(maxsize=4)
def classes(files: ImageFiles) -> tuple[str, ...]:
    """Class names: the folders of ``train`` that hold files."""
    names = sorted({name.split("/")[1] for name in files.names("train") if name.count("/") > 1})
    if not names:
        raise SmartpruneError(f"{files.where('train')} holds no folders with images; the layout is train/CLASS/*.jpg")
    return tuple(names)


@lru_cache(maxsize=4)
def list_images(files: ImageFiles, folder: str, limit: int) -> Index:
    """The images of ``train`` or ``val``, class by class. Every class must have at least one."""
    known = classes(files)
    by_class: dict[str, list[str]] = {name: [] for name in known}
    listed = files.names(folder)
    if not listed:
        raise SmartpruneError(f"{files.where(folder)} is missing or empty; the layout is {folder}/CLASS/*.jpg")
    for name in listed:
        label = name.split("/")[1]
        if name.count("/") < 2 or not name.lower().endswith(SUFFIXES):
            continue
        if label not in by_class:
            where = files.where(f"{folder}/{label}")
            raise SmartpruneError(f"{where} is a class that train does not have; its classes are {_shorten(known)}")
        by_class[label].append(name)
    empty = [name for name in known if not by_class[name]]
    if not files.is_tar:
        folders = (p.name for p in (files.path / folder).iterdir() if p.is_dir() and not p.name.startswith("."))
        empty += sorted(name for name in folders if name not in by_class)
    if empty:
        raise SmartpruneError(f"{files.where(f'{folder}/{empty[0]}')} holds no images ({', '.join(SUFFIXES)})")
    pairs = [(name, label) for label, names in enumerate(by_class.values()) for name in names[: limit or None]]
    return tuple(name for name, _ in pairs), tuple(label for _, label in pairs)


def hold_out(names: tuple[str, ...], labels: tuple[int, ...], holdout: int, heldout: bool) -> Index:
    """Only the ``holdout`` images of each class that are held out, or only the others. The choice is random but fixed."""
    selected: set[int] = set()
    for label in sorted(set(labels)) if holdout else ():
        members = [i for i, other in enumerate(labels) if other == label]
        if holdout >= len(members):
            name = names[members[0]].rpartition("/")[0]
            raise SmartpruneError(f"imagefolder: holdout={holdout} leaves none of the {len(members)} images of {name} for training")
        order = torch.randperm(len(members), generator=torch.Generator().manual_seed(label))
        selected |= {members[i] for i in order[:holdout].tolist()}
    result = [i for i in range(len(names)) if (i in selected) == heldout]
    return tuple(names[i] for i in result), tuple(labels[i] for i in result)


@lru_cache(maxsize=3)
def load_all(path: Path, names: tuple[str, ...], side: int) -> Tensor:
    files = open_images(path, FOLDERS)
    return decode_all(lambda number: load(files, names[number], side), len(names))


def load(files: ImageFiles, name: str, side: int) -> Tensor:
    """One image [side, side, 3]: its shorter side is resized to ``side``, then the center is cropped."""
    image = files.rgb(name, min_side=side)
    short = min(image.size)
    if short != side:
        if 3 * side * max(image.size) * side // short > max(FREE_BYTES, 96 * side * side):
            raise SmartpruneError(
                f"{files.where(name)} has {image.size[0]}x{image.size[1]} pixels, too elongated to be resized; crop it"
            )
        image = image.resize([max(side, round(length * side / short)) for length in image.size], resample=3)  # bicubic
    left, top = ((length - side) // 2 for length in image.size)
    return torch.from_numpy(np.array(image.crop((left, top, left + side, top + side))))


def _shorten(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
