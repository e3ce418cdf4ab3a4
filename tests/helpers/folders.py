"""Small made-up folders of pictures: one folder per class, and pictures with masks in two layouts; and tars of them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
CLASSES = ("ant", "bee", "cat")
TRAIN, VAL = 8, 3  # pictures of a class
WIDE, HIGH = 48, 40
PAIRS = {"train": 6, "val": 2, "test": 3}
IGNORE = 255


def pixels(label: int, number: int, width: int = 16, height: int = 16) -> Bytes:
    """Squares of 4x4; the brighter, the higher the label."""
    draw = np.random.default_rng((label, number))
    squares = draw.integers(0, 80, (height // 4, width // 4, 3)) + 80 * label
    return squares.astype(np.uint8).repeat(4, axis=0).repeat(4, axis=1)


def save(path: Path, values: Bytes) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


def write_classes(folder: Path, suffix: str = "png", train: int = TRAIN) -> Path:
    for part, count, first in (("train", train, 0), ("val", VAL, 1000)):
        for label, name in enumerate(CLASSES):
            for i in range(count):
                save(folder / part / name / f"{i}.{suffix}", pixels(label, first + i))
    return folder


def drawn(split: str, number: int) -> tuple[Bytes, Bytes]:
    """A picture in which the red of a pixel is 40 times its class, and the mask, which begins with no class."""
    draw = np.random.default_rng((len(split), number))
    mask = draw.integers(0, 4, (HIGH // 8, WIDE // 8)).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)
    picture = np.stack([mask * 40, *draw.integers(0, 255, (2, HIGH, WIDE))], axis=2).astype(np.uint8)
    mask[:3] = IGNORE
    return picture, mask


def write_pairs(folder: Path, city: bool = False, test: bool = True, train: int = PAIRS["train"]) -> Path:
    for split, count in {**PAIRS, "train": train, "test": PAIRS["test"] * test}.items():
        for i in range(count):
            names = (f"images/{split}/{i}.png", f"labels/{split}/{i}.png")
            if city:
                stem = f"{split}/ulm/ulm_{i}"
                names = (f"leftImg8bit/{stem}_leftImg8bit.png", f"gtFine/{stem}_gtFine_labelTrainIds.png")
            for name, values in zip(names, drawn(split, i), strict=True):
                save(folder / name, values)
    return folder


def pack(folder: Path, tar: Path, top: str = ".") -> Path:
    with tarfile.open(tar, "w") as file:
        file.add(folder, arcname=top)
    return tar
