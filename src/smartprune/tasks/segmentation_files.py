"""Finds pictures and their masks on disk or in a tar, in two layouts; what does not fit is named.

- ``images/SPLIT/NAME.jpg`` and ``labels/SPLIT/NAME.png`` for train, val and perhaps test, perhaps with a ``classes.json``;
- that of Cityscapes: ``leftImg8bit/SPLIT/CITY/X_leftImg8bit.png`` and ``gtFine/SPLIT/CITY/X_gtFine_labelTrainIds.png``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SmartpruneError
from .pictures import SUFFIXES, Files, decoded, opened

IGNORE = 255  # of a mask: belongs to no class, counts nowhere
CITYSCAPES = 19  # classes
WITHIN = ("images", "leftImg8bit")
OWN = ("images", "labels")
Pair = tuple[str, str]  # names of picture and mask


def part(files: Files, split: str) -> str | None:
    """The folder that stands for a split; None for a validation split that there is not.

    Results are those of ``test`` where its masks are there, and ``val`` is to choose by; else results are those of ``val``.
    The masks of the test set of Cityscapes are not public.
    """
    if split == "train":
        return "train"
    tested = bool(files.names("labels/test"))
    if split == "test":
        return "test" if tested else "val"
    return "val" if tested else None


@lru_cache(maxsize=8)
def pairs(files: Files, folder: str) -> tuple[Pair, ...]:
    """Pictures and masks of ``train``, ``val`` or ``test``, in the order of their names."""
    city = bool(files.names("leftImg8bit"))
    top, masks, ending, mask_ending = ("leftImg8bit", "gtFine", "_leftImg8bit", "_gtFine_labelTrainIds") if city else (*OWN, "", "")
    names = [name for name in files.names(f"{top}/{folder}") if name.lower().endswith(SUFFIXES)]
    if not names:
        raise SmartpruneError(f"{files.where(f'{top}/{folder}')} is missing or holds no pictures ({', '.join(SUFFIXES)})")
    out, used = [], set()
    for name in names:
        stem = name.rpartition(".")[0].removeprefix(f"{top}/")
        mask = f"{masks}/{stem.removesuffix(ending)}{mask_ending}.png"
        if mask not in files.found:
            raise SmartpruneError(f"{files.where(name)} has no mask; it should be {files.where(mask)}")
        out.append((name, mask))
        used.add(mask)
    lone = [name for name in files.names(f"{masks}/{folder}") if name.endswith(f"{mask_ending}.png") and name not in used]
    if lone:
        raise SmartpruneError(f"{files.where(lone[0])} is a mask without a picture in {top}/{folder}")
    return tuple(out)


@lru_cache(maxsize=4)
def classes(files: Files, given: int) -> int:
    """Number of classes: as given, as ``classes.json`` says, 19 for Cityscapes, else by the training masks."""
    if given:
        return given
    if files.names("leftImg8bit"):
        return CITYSCAPES
    if "classes.json" in files.found:
        try:
            return len(json.loads(files.read("classes.json"))["classes"])
        except (ValueError, KeyError, TypeError) as error:
            where = files.where("classes.json")
            raise SmartpruneError(f'{where} should hold {{"classes": [names]}} ({type(error).__name__}: {error})') from None
    highest = 0
    for _, name in pairs(files, "train"):
        values = mask(files, name, None)
        highest = max(highest, int(values[values != IGNORE].max(initial=0)))
    return highest + 1


def side(text: str) -> tuple[int, int] | None:
    """``960x480`` as width and height."""
    if not text:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        raise SmartpruneError(f"segmentation: resize={text!r} should be WIDTHxHEIGHT, such as 1024x512, or empty")
    return int(width), int(height)


def mask(files: Files, name: str, resize: tuple[int, int] | None) -> NDArray[np.uint8]:
    image = files.picture(name)
    if image.mode not in ("L", "P", "1"):
        raise SmartpruneError(
            f"{files.where(name)} has the mode {image.mode}; a mask has one byte per pixel, the number of its class"
        )
    if resize is not None and image.size != resize:
        image = image.resize(resize, resample=0)  # nearest
    return np.array(image, dtype=np.uint8)


def load(files: Files, pair: Pair, count: int, resize: tuple[int, int] | None) -> Tensor:
    """Picture and mask as bytes [height, width, 4]; the mask is the last channel."""
    image = files.colours(pair[0])
    own = image.size
    if resize is not None and own != resize:
        image = image.resize(resize, resample=2)  # bilinear
    values = mask(files, pair[1], resize)
    pixels = np.array(image)
    if pixels.shape[:2] != values.shape:
        size = f"{values.shape[1]}x{values.shape[0]}"
        raise SmartpruneError(f"{files.where(pair[1])} has {size} pixels, its picture {own[0]}x{own[1]}")
    wrong = (values >= count) & (values != IGNORE)
    if wrong.any():
        raise SmartpruneError(
            f"{files.where(pair[1])} holds the class {values[wrong][0]}; there are 0 to {count - 1}, and {IGNORE} for none"
        )
    return torch.from_numpy(np.concatenate([pixels, values[:, :, None]], axis=2))


def alike(files: Files, pair: Pair, count: int, resize: tuple[int, int] | None, shape: tuple[int, ...]) -> Tensor:
    """As ``load``, of a set whose pictures all have one size."""
    out = load(files, pair, count, resize)
    if tuple(out.shape) != shape:
        raise SmartpruneError(
            f"{files.where(pair[0])} has {out.shape[1]}x{out.shape[0]} pixels, those before it {shape[1]}x{shape[0]}; "
            "bring all to one size with the setting resize=WIDTHxHEIGHT"
        )
    return out


@lru_cache(maxsize=3)
def everything(place: Path, folder: str, count: int, resize: tuple[int, int] | None) -> Tensor:
    files = opened(place, WITHIN)
    listed = pairs(files, folder)
    shape = tuple(load(files, listed[0], count, resize).shape)
    return decoded(lambda number: alike(files, listed[number], count, resize, shape), len(listed))
