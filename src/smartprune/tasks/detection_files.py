"""Reads boxes as COCO writes them, and the pictures they belong to; what does not fit is named, file and entry.

- ``images/SPLIT/NAME.jpg`` and ``annotations/instances_SPLIT.json`` for train, val and perhaps test;
- that of COCO 2017: ``train2017/NAME.jpg`` and ``annotations/instances_train2017.json``.

Boxes are x, y, width and height in pixels. Category numbers may be any; classes are 0, 1, ... in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SmartpruneError
from ..fields import Fields
from ..files import parse_json
from .boxes import Fit
from .pictures import SUFFIXES, Files, decoded, opened

WITHIN = ("annotations",)
YEARS = ("", "2017")  # what may follow the name of a split
MOST = 100_000_000  # entries of a list
SLACK = 1.0  # pixels that a box may reach beyond its picture, as rounding makes them; it is cut off there
GREY = 114  # around a picture that is not square
Corners = tuple[float, float, float, float]


@dataclass(frozen=True)
class Picture:
    """A picture and its objects; those of a crowd are not learned and count neither as found nor as missed."""

    number: int  # its id
    name: str  # of its file
    width: int
    height: int
    boxes: tuple[Corners, ...]
    classes: tuple[int, ...]
    areas: tuple[float, ...]
    crowd: tuple[bool, ...]


@dataclass(frozen=True)
class Truth:
    """The pictures of a split, and the ids and names of the classes."""

    where: str
    pictures: tuple[Picture, ...]
    categories: tuple[tuple[int, str], ...]

    def require_boxes(self, why: str) -> None:
        if all(crowd for picture in self.pictures for crowd in picture.crowd):
            raise SmartpruneError(f"{self.where} holds no box that counts; there is nothing to {why}")

    def to_coco(self) -> dict[str, Any]:
        """As an evaluator takes it: checked, and nothing else in it."""
        objects = [(p, *each) for p in self.pictures for each in zip(p.boxes, p.classes, p.areas, p.crowd, strict=True)]
        return {
            "info": {},
            "images": [{"id": p.number, "file_name": p.name, "width": p.width, "height": p.height} for p in self.pictures],
            "categories": [{"id": number, "name": name} for number, name in self.categories],
            "annotations": [
                {
                    "id": place,
                    "image_id": picture.number,
                    "category_id": self.categories[label][0],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for place, (picture, (x1, y1, x2, y2), label, area, crowd) in enumerate(objects, start=1)
            ],
        }


def part(files: Files, split: str) -> str | None:
    """The name in the files that stands for a split; None for a validation split that there is not.

    Results are those of ``test`` where its boxes are there, and ``val`` is to choose by; else results are those of ``val``.
    """
    named = {name: _year(files, name) for name in ("train", "val", "test")}
    if split == "train":
        return named["train"] or "train"
    if split == "test":
        return named["test"] or named["val"] or "val"
    return named["val"] if named["test"] else None


def _year(files: Files, name: str) -> str | None:
    return next((name + year for year in YEARS if _listing(name + year) in files.found), None)


def _listing(name: str) -> str:
    return f"annotations/instances_{name}.json"


@lru_cache(maxsize=4)
def truth(files: Files, name: str, lenient: bool = False) -> Truth:
    """The boxes of ``train``, ``val`` or ``test``, with the file of every picture found."""
    listing = _listing(name)
    if listing not in files.found:
        raise SmartpruneError(f"{files.where(listing)} is missing; it holds the boxes of the split in COCO's form")
    out = read(files.read(listing), files.where(listing), lenient)
    folder = next((top for top in (f"images/{name}", name) if files.names(top)), f"images/{name}")
    pictures, listed = [], set()
    for entry in out.pictures:
        path = f"{folder}/{entry.name}"
        if path not in files.found:
            raise SmartpruneError(f"{out.where} lists {entry.name} (id {entry.number}), but there is no {files.where(path)}")
        if path in listed:
            raise SmartpruneError(f"{out.where}: {entry.name} is listed twice, the second time with id {entry.number}")
        listed.add(path)
        pictures.append(Picture(**{**vars(entry), "name": path}))
    lone = [path for path in files.names(folder) if path.lower().endswith(SUFFIXES) and path not in listed]
    if lone:
        raise SmartpruneError(f"{files.where(lone[0])} has no entry in {listing}; add one (without boxes if there are none)")
    return Truth(out.where, tuple(pictures), out.categories)


def checked(files: Files, name: str, lenient: bool = False) -> Truth:
    """As ``truth``, with the classes of the training split."""
    out, training = truth(files, name, lenient), truth(files, part(files, "train") or "train", lenient)
    if out.categories != training.categories:
        raise SmartpruneError(
            f"{out.where} has the categories {_some(out.categories)}, but {training.where} has {_some(training.categories)}"
        )
    return out


def read(content: bytes, where: str, lenient: bool = False) -> Truth:
    """COCO's JSON, every entry checked. ``lenient`` leaves out boxes of no size or beyond their picture."""
    data = Fields(parse_json(content, where), where)
    categories = _categories(data)
    classes = {number: place for place, (number, _) in enumerate(categories)}
    pictures: dict[int, Fields] = {}
    for entry in data.items("images", MOST):
        number = entry.integer("id")
        if number in pictures:
            raise SmartpruneError(f"{entry.where}: id {number} comes twice among the images")
        entry.text("file_name"), entry.integer("width", 1, 1 << 20), entry.integer("height", 1, 1 << 20)
        pictures[number] = entry
    if not pictures:
        raise SmartpruneError(f"{where} lists no images")
    objects: dict[int, list[tuple[Corners, int, float, bool]]] = {number: [] for number in pictures}
    seen: set[int] = set()
    for entry in data.items("annotations", MOST):
        number, owner, category = entry.integer("id"), entry.integer("image_id"), entry.integer("category_id")
        if number in seen:
            raise SmartpruneError(f"{entry.where}: id {number} comes twice among the annotations")
        seen.add(number)
        named = f"{entry.where} (id {number})"
        if owner not in pictures:
            raise SmartpruneError(f"{named}: image_id {owner} is the id of none of the images")
        if category not in classes:
            raise SmartpruneError(f"{named}: category_id {category} is unknown; there are {_some(categories)}")
        crowd = bool(entry.integer("iscrowd", 0, 1)) if "iscrowd" in entry.data else False
        image = pictures[owner]
        box = _box(entry, named, image.integer("width"), image.integer("height"), image.text("file_name"), lenient)
        if box is not None:
            sides = (box[2] - box[0]) * (box[3] - box[1])
            area = _numbers([entry.raw("area")], f"{named}: area", 1)[0] if "area" in entry.data else sides
            objects[owner].append((box, classes[category], area, crowd))
    found = [_picture(entry, objects[number]) for number, entry in pictures.items()]
    return Truth(where, tuple(found), categories)


def _categories(data: Fields) -> tuple[tuple[int, str], ...]:
    out: dict[int, str] = {}
    for entry in data.items("categories", MOST):
        number = entry.integer("id")
        if number in out:
            raise SmartpruneError(f"{entry.where}: id {number} comes twice among the categories")
        out[number] = entry.text("name")
    if not out:
        raise SmartpruneError(f"{data.where} lists no categories")
    return tuple(sorted(out.items()))


def _picture(entry: Fields, objects: Sequence[tuple[Corners, int, float, bool]]) -> Picture:
    columns = tuple(zip(*objects, strict=True)) if objects else ((), (), (), ())
    size = entry.integer("width"), entry.integer("height")
    return Picture(entry.integer("id"), entry.text("file_name"), *size, *columns)


def _box(entry: Fields, named: str, width: int, height: int, name: str, lenient: bool) -> Corners | None:
    """The corners, cut off at the picture's edge."""
    x, y, w, h = _numbers(entry.raw("bbox"), f"{named}: bbox", 4)
    wrong = ""
    if w <= 0 or h <= 0:
        wrong = f"has no size ({w:g} x {h:g})"
    elif min(x, y) < -SLACK or x + w > width + SLACK or y + h > height + SLACK:
        wrong = f"{[x, y, w, h]} reaches beyond {name}, which has {width}x{height} pixels"
    corners = max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))
    if not wrong and (corners[0] >= corners[2] or corners[1] >= corners[3]):
        wrong = f"{[x, y, w, h]} lies outside of {name}, which has {width}x{height} pixels"
    if wrong and not lenient:
        raise SmartpruneError(f"{named}: the box {wrong}; correct or delete the entry")
    return None if wrong else corners


def _numbers(value: object, where: str, count: int) -> tuple[float, ...]:
    ok = isinstance(value, list) and len(value) == count
    if not ok or not all(type(v) in (int, float) and math.isfinite(v) and abs(v) < 1e9 for v in value):  # type: ignore[attr-defined]
        raise SmartpruneError(f"{where} is {str(value)[:60]}; it must be {count} finite number{'s' * (count > 1)}")
    return tuple(float(v) for v in value)  # type: ignore[attr-defined]


def checked_finds(data: object, truth: Truth, where: str) -> list[dict[str, Any]]:
    """COCO's form of results: a list of finds with ``image_id``, ``category_id``, ``bbox`` and ``score``."""
    if not isinstance(data, list):
        raise SmartpruneError(f"{where} holds a {type(data).__name__}; results are a list of finds")
    images, categories = {p.number for p in truth.pictures}, {number for number, _ in truth.categories}
    out = []
    for place, item in enumerate(data):
        entry = Fields(item, f"{where}: [{place}]")
        image, category = entry.integer("image_id"), entry.integer("category_id")
        if image not in images:
            raise SmartpruneError(f"{entry.where}: image_id {image} is none of the images of {truth.where}")
        if category not in categories:
            raise SmartpruneError(f"{entry.where}: category_id {category} is none of the categories of {truth.where}")
        box = _numbers(entry.raw("bbox"), f"{entry.where}: bbox", 4)
        (score,) = _numbers([entry.raw("score")], f"{entry.where}: score", 1)
        out.append({"image_id": image, "category_id": category, "bbox": list(box), "score": score})
    return out


def load(files: Files, picture: Picture, size: int) -> Tensor:
    """One picture as bytes [size, size, 3]: its longer side brought to ``size``, grey around the shorter."""
    image = files.colours(picture.name)
    if image.size != (picture.width, picture.height):
        raise SmartpruneError(
            f"{files.where(picture.name)} has {image.size[0]}x{image.size[1]} pixels, but its entry "
            f"(id {picture.number}) says {picture.width}x{picture.height}"
        )
    fit = Fit(picture.width, picture.height, size)
    if image.size != fit.inner:
        image = image.resize(fit.inner, resample=2)  # bilinear over all pixels that fall together
    out = np.full((size, size, 3), GREY, np.uint8)
    (left, top), (wide, high) = fit.start, fit.inner
    out[top : top + high, left : left + wide] = np.asarray(image)
    return torch.from_numpy(out)


@lru_cache(maxsize=3)
def everything(place: Path, name: str, size: int, lenient: bool) -> Tensor:
    files = opened(place, WITHIN)
    listed = truth(files, name, lenient).pictures
    return decoded(lambda number: load(files, listed[number], size), len(listed))


def _some(categories: Sequence[tuple[int, str]]) -> str:
    shown = ", ".join(f"{number} ({name})" for number, name in categories[:10])
    return shown + (f" and {len(categories) - 10} more" if len(categories) > 10 else "")
