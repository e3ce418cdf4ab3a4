"""Writes small image folders: one folder per class, images with masks in two layouts, and tar files of both."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
CLASSES = ("ant", "bee", "cat")
TRAIN, VAL = 8, 3  # images per class
WIDTH, HEIGHT = 48, 40
PAIRS = {"train": 6, "val": 2, "test": 3}
IGNORE = 255


def pixels(label: int, number: int, width: int = 16, height: int = 16) -> ByteArray:
    """An image of 4x4 squares whose brightness grows with the label."""
    rng = np.random.default_rng((label, number))
    squares = rng.integers(0, 80, (height // 4, width // 4, 3)) + 80 * label
    return squares.astype(np.uint8).repeat(4, axis=0).repeat(4, axis=1)


def save_image(path: Path, values: ByteArray) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def write_classes(folder: Path, suffix: str = "png", train: int = TRAIN) -> Path:
    for part, count, first in (("train", train, 0), ("val", VAL, 1000)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                save_image(folder / part / name / f"{i}.{suffix}", pixels(label, first + i))
    return folder


def image_and_mask(split: str, number: int) -> tuple[ByteArray, ByteArray]:
    """An image whose red channel is 40 times the class, and its mask. The first three rows of the mask are ignored."""
    rng = np.random.default_rng((len(split), number))
    mask = rng.integers(0, 4, (HEIGHT // 8, WIDTH // 8)).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    image = np.stack([mask * 40, *rng.integers(0, 255, (2, HEIGHT, WIDTH))], axis=2).astype(np.uint8)
    mask[:3] = IGNORE
    return image, mask


def write_pairs(folder: Path, city: bool = False, test: bool = True, train: int = PAIRS["train"]) -> Path:
    for split, count in {**PAIRS, "train": train, "test": PAIRS["test"] * test}.items():
        for i in range(count):
            names = (f"images/{split}/{i}.png", f"labels/{split}/{i}.png")
            if city:
                stem = f"{split}/ulm/ulm_{i}"
                names = (f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelTrainIds.png")
            for name, values in zip(names, image_and_mask(split, i), strict=True):
                save_image(folder / name, values)
    return folder


def make_tar(folder: Path, tar: Path, top: str = ".") -> Path:
    with tarfile.open(tar, "w") as file:
        file.add(folder, arcname=top)
    return tar
