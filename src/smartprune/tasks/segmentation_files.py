"""Finds images and their masks in a folder or a tar file, in two layouts. Errors name the file.

- ``images/SPLIT/NAME.jpg`` and ``labels/SPLIT/NAME.png`` for train, val and optionally test, with an optional ``classes.json``;
- Cityscapes: ``leftImg8bit/SPLIT/CITY/X_leftImg8bit.png`` and ``gtFine/SPLIT/CITY/X_gtFine_labelTrainIds.png``.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SmartpruneError
from ..files import parse_json
from .images import SUFFIXES, ImageFiles, decode_all, open_images

IGNORE = 255  # mask value of pixels without a class, which are never counted
CITYSCAPES_CLASSES = 19
FOLDERS = ("images", "leftImg8bit")
Pair = tuple[str, str]  # names of the image and the mask


def folder_of(files: ImageFiles, split: str) -> str | None:
    """The folder of a split, or ``None`` if there is no validation split.

    If ``test`` has masks, it is the test split and ``val`` the validation split. Otherwise ``val`` is the test split, as for
    Cityscapes, whose test masks are not public.
    """
    if split == "train":
        return "train"
    has_test = bool(files.names("labels/test"))
    if split == "test":
        return "test" if has_test else "val"
    return "val" if has_test else None


@lru_cache(maxsize=8)
def list_pairs(files: ImageFiles, folder: str) -> tuple[Pair, ...]:
    """Images and masks of ``train``, ``val`` or ``test``, sorted by name."""
    top, mask_top, ending, mask_ending = "images", "labels", "", ""
    if files.names("leftImg8bit"):
        top, mask_top, ending, mask_ending = "leftImg8bit", "gtFine", "_leftImg8bit", "_gtFine_labelTrainIds"
    names = [name for name in files.names(f"{top}/{folder}") if name.lower().endswith(SUFFIXES)]
    if not names:
        raise SmartpruneError(f"{files.where(f'{top}/{folder}')} is missing or holds no images ({', '.join(SUFFIXES)})")
    out, masks = [], set()
    for name in names:
        stem = name.rpartition(".")[0].removeprefix(f"{top}/")
        mask = f"{mask_top}/{stem.removesuffix(ending)}{mask_ending}.png"
        if mask not in files:
            raise SmartpruneError(f"{files.where(name)} has no mask; add {files.where(mask)}")
        out.append((name, mask))
        masks.add(mask)
    unused = [name for name in files.names(f"{mask_top}/{folder}") if name.endswith(f"{mask_ending}.png") and name not in masks]
    if unused:
        raise SmartpruneError(f"{files.where(unused[0])} is a mask without an image in {top}/{folder}; add the image or delete it")
    return tuple(out)


@lru_cache(maxsize=4)
def count_classes(files: ImageFiles, setting: int) -> int:
    """Number of classes: the setting, the length of ``classes.json``, 19 for Cityscapes, or from the training masks."""
    if setting:
        return setting
    if files.names("leftImg8bit"):
        return CITYSCAPES_CLASSES
    if "classes.json" in files:
        path = files.where("classes.json")
        data = parse_json(files.read("classes.json"), path)
        names = data.get("classes") if isinstance(data, dict) else None
        if not isinstance(names, list) or not 0 < len(names) <= IGNORE:
            raise SmartpruneError(f'{path} must hold {{"classes": [names]}} with 1 to {IGNORE} names')
        return len(names)
    highest = 0
    for _, name in list_pairs(files, "train"):
        values = load_mask(files, name, None)
        highest = max(highest, int(values[values != IGNORE].max(initial=0)))
    return highest + 1


def parse_size(text: str) -> tuple[int, int] | None:
    """``960x480`` as width and height."""
    if not text:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise SmartpruneError(f"segmentation: resize={text!r} is not a size; use WIDTHxHEIGHT, such as 1024x512, or leave it empty")
    return int(width), int(height)


def load_mask(files: ImageFiles, name: str, resize: tuple[int, int] | None) -> NDArray[np.uint8]:
    image = files.image(name)
    if image.mode not in ("L", "P", "1"):
        raise SmartpruneError(
            f"{files.where(name)} has the mode {image.mode}; a mask has one byte per pixel, the index of the class"
        )
    if resize is not None and image.size != resize:
        image = image.resize(resize, resample=0)  # nearest
    return np.array(image, dtype=np.uint8)


def load_pair(files: ImageFiles, pair: Pair, classes: int, resize: tuple[int, int] | None) -> Tensor:
    """Image and mask as bytes [height, width, 4]; the mask is the last channel."""
    image = files.rgb(pair[0])
    original = image.size
    if resize is not None and original != resize:
        image = image.resize(resize, resample=2)  # bilinear
    mask = load_mask(files, pair[1], resize)
    pixels = np.array(image)
    if pixels.shape[:2] != mask.shape:
        size = f"{mask.shape[1]}x{mask.shape[0]}"
        raise SmartpruneError(f"{files.where(pair[1])} has {size} pixels, but its image has {original[0]}x{original[1]}")
    wrong = (mask >= classes) & (mask != IGNORE)
    if wrong.any():
        raise SmartpruneError(
            f"{files.where(pair[1])} holds the class {mask[wrong][0]}; use 0 to {classes - 1}, or {IGNORE} for no class"
        )
    return torch.from_numpy(np.concatenate([pixels, mask[:, :, None]], axis=2))


def load_equal(files: ImageFiles, pair: Pair, classes: int, resize: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """Like ``load_pair``, but checks that the image has the size of the others."""
    out = load_pair(files, pair, classes, resize)
    if tuple(out.shape) != shape:
        raise SmartpruneError(
            f"{files.where(pair[0])} has {out.shape[1]}x{out.shape[0]} pixels, but the first image has {shape[1]}x{shape[0]}; "
            "resize all images with the setting resize=WIDTHxHEIGHT"
        )
    return out


@lru_cache(maxsize=3)
def load_all(path: Path, folder: str, classes: int, resize: tuple[int, int] | None) -> Tensor:
    files = open_images(path, FOLDERS)
    pairs = list_pairs(files, folder)
    shape = tuple(load_pair(files, pairs[0], classes, resize).shape)
    return decode_all(lambda number: load_equal(files, pairs[number], classes, resize, shape), len(pairs))
