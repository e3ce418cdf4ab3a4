"""Reads boxes in COCO's format, and their images, in two layouts. Errors name the file and the entry.

- ``images/SPLIT/NAME.jpg`` and ``annotations/instances_SPLIT.json`` for train, val and optionally test;
- COCO 2017: ``train2017/NAME.jpg`` and ``annotations/instances_train2017.json``.

Boxes are x, y, width and height in pixels. Category ids may be any integers; classes are 0, 1, ... in the order of the ids.
"""

from __future__ import annotations

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
from .boxes import Letterbox
from .images import SUFFIXES, ImageFiles, decode_all, open_images

FOLDERS = ("annotations",)
YEARS = ("", "2017")  # suffixes of split names
MAX_BYTES = 1 << 31  # of a file of annotations
MAX_ENTRIES = 100_000_000  # of a list
TOLERANCE = 1.0  # pixels that a box may extend beyond its image because of rounding; they are clipped
GRAY = 114  # padding of images that are not square
Corners = tuple[float, float, float, float]


@dataclass(frozen=True)
class AnnotatedImage:
    """An image and its objects. Crowd boxes are not used for training, and the metric ignores them."""

    id: int
    name: str
    width: int
    height: int
    boxes: tuple[Corners, ...]
    classes: tuple[int, ...]
    areas: tuple[float, ...]
    crowd: tuple[bool, ...]


@dataclass(frozen=True)
class GroundTruth:
    """The images of a split, and the ids and names of the categories."""

    where: str
    images: tuple[AnnotatedImage, ...]
    categories: tuple[tuple[int, str], ...]

    def require_boxes(self, purpose: str) -> None:
        if all(crowd for image in self.images for crowd in image.crowd):
            raise SmartpruneError(f"{self.where} holds no boxes except crowds; nothing to {purpose}")

    def to_coco(self) -> dict[str, Any]:
        """The checked data in COCO's format, for an evaluator."""
        objects = [(i, *columns) for i in self.images for columns in zip(i.boxes, i.classes, i.areas, i.crowd, strict=True)]
        return {
            "info": {},
            "images": [{"id": i.id, "file_name": i.name, "width": i.width, "height": i.height} for i in self.images],
            "categories": [{"id": number, "name": name} for number, name in self.categories],
            "annotations": [
                {
                    "id": number,
                    "image_id": image.id,
                    "category_id": self.categories[label][0],
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for number, (image, (x1, y1, x2, y2), label, area, crowd) in enumerate(objects, start=1)
            ],
        }


def folder_of(files: ImageFiles, split: str) -> str | None:
    """The name of a split in the files, or ``None`` if there is no validation split.

    If ``test`` has boxes, it is the test split and ``val`` the validation split. Otherwise ``val`` is the test split.
    """
    names = {name: _with_year(files, name) for name in ("train", "val", "test")}
    if split == "train":
        return names["train"] or "train"
    if split == "test":
        return names["test"] or names["val"] or "val"
    return names["val"] if names["test"] else None


def _with_year(files: ImageFiles, name: str) -> str | None:
    return next((name + year for year in YEARS if _annotations_of(name + year) in files), None)


def _annotations_of(name: str) -> str:
    return f"annotations/instances_{name}.json"


@lru_cache(maxsize=4)
def load_truth(files: ImageFiles, name: str, lenient: bool = False) -> GroundTruth:
    """The boxes of ``train``, ``val`` or ``test``. Every image must have a file, and every file an entry."""
    annotations = _annotations_of(name)
    if annotations not in files:
        raise SmartpruneError(f"{files.where(annotations)} is missing; it holds the boxes of the split in COCO's format")
    truth = parse_annotations(files.read(annotations, MAX_BYTES), files.where(annotations), lenient)
    folder = next((top for top in (f"images/{name}", name) if files.names(top)), f"images/{name}")
    images, listed = [], set()
    for image in truth.images:
        path = f"{folder}/{image.name}"
        if path not in files:
            raise SmartpruneError(f"{truth.where} lists {image.name} (id {image.id}), but {files.where(path)} is missing")
        if path in listed:
            raise SmartpruneError(f"{truth.where}: {image.name} is listed twice, the second time with id {image.id}")
        listed.add(path)
        images.append(AnnotatedImage(**{**vars(image), "name": path}))
    unlisted = [path for path in files.names(folder) if path.lower().endswith(SUFFIXES) and path not in listed]
    if unlisted:
        raise SmartpruneError(f"{files.where(unlisted[0])} has no entry in {annotations}; add one, even if it has no boxes")
    return GroundTruth(truth.where, tuple(images), truth.categories)


def load_checked_truth(files: ImageFiles, name: str, lenient: bool = False) -> GroundTruth:
    """Like ``load_truth``, but checks that the categories are those of the training split."""
    truth, training = load_truth(files, name, lenient), load_truth(files, folder_of(files, "train") or "train", lenient)
    if truth.categories != training.categories:
        raise SmartpruneError(
            f"{truth.where} has the categories {_shorten(truth.categories)}, "
            f"but {training.where} has {_shorten(training.categories)}"
        )
    return truth


def parse_annotations(content: bytes, where: str, lenient: bool = False) -> GroundTruth:
    """COCO's JSON with every entry checked. ``lenient`` drops boxes without area or outside of their image."""
    data = Fields(parse_json(content, where), where)
    categories = _categories(data)
    classes = {number: label for label, (number, _) in enumerate(categories)}
    images: dict[int, Fields] = {}
    for entry in data.items("images", MAX_ENTRIES):
        number = entry.integer("id")
        if number in images:
            raise SmartpruneError(f"{entry.where}: id {number} is used twice in images; ids must be unique")
        entry.text("file_name"), entry.integer("width", 1, 1 << 20), entry.integer("height", 1, 1 << 20)
        images[number] = entry
    if not images:
        raise SmartpruneError(f"{where} lists no images")
    objects: dict[int, list[tuple[Corners, int, float, bool]]] = {number: [] for number in images}
    ids: set[int] = set()
    for entry in data.items("annotations", MAX_ENTRIES):
        number, image_id, category = entry.integer("id"), entry.integer("image_id"), entry.integer("category_id")
        if number in ids:
            raise SmartpruneError(f"{entry.where}: id {number} is used twice in annotations; ids must be unique")
        ids.add(number)
        where_entry = f"{entry.where} (id {number})"
        if image_id not in images:
            raise SmartpruneError(f"{where_entry}: image_id {image_id} is not the id of an image")
        if category not in classes:
            raise SmartpruneError(f"{where_entry}: category_id {category} is unknown; the categories are {_shorten(categories)}")
        crowd = bool(entry.integer("iscrowd", 0, 1)) if "iscrowd" in entry.data else False
        box = _box(entry, where_entry, images[image_id], lenient)
        if box is not None:
            product = (box[2] - box[0]) * (box[3] - box[1])
            area = _numbers([entry.raw("area")], f"{where_entry}: area", 1)[0] if "area" in entry.data else product
            objects[image_id].append((box, classes[category], area, crowd))
    return GroundTruth(where, tuple(_image(entry, objects[number]) for number, entry in images.items()), categories)


def _categories(data: Fields) -> tuple[tuple[int, str], ...]:
    out: dict[int, str] = {}
    for entry in data.items("categories", MAX_ENTRIES):
        number = entry.integer("id")
        if number in out:
            raise SmartpruneError(f"{entry.where}: id {number} is used twice in categories; ids must be unique")
        out[number] = entry.text("name")
    if not out:
        raise SmartpruneError(f"{data.where} lists no categories")
    return tuple(sorted(out.items()))


def _image(entry: Fields, objects: Sequence[tuple[Corners, int, float, bool]]) -> AnnotatedImage:
    columns = tuple(zip(*objects, strict=True)) if objects else ((), (), (), ())
    size = entry.integer("width"), entry.integer("height")
    return AnnotatedImage(entry.integer("id"), entry.text("file_name"), *size, *columns)


def _box(entry: Fields, where: str, image: Fields, lenient: bool) -> Corners | None:
    """The corners, clipped to the image; ``None`` for an invalid box if ``lenient``."""
    width, height, name = image.integer("width"), image.integer("height"), image.text("file_name")
    x, y, w, h = _numbers(entry.raw("bbox"), f"{where}: bbox", 4)
    problem = ""
    if w <= 0 or h <= 0:
        problem = f"has no area ({w:g} x {h:g})"
    elif min(x, y) < -TOLERANCE or x + w > width + TOLERANCE or y + h > height + TOLERANCE:
        problem = f"{[x, y, w, h]} extends beyond {name}, which has {width}x{height} pixels"
    corners = max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))
    if not problem and (corners[0] >= corners[2] or corners[1] >= corners[3]):
        problem = f"{[x, y, w, h]} lies outside of {name}, which has {width}x{height} pixels"
    if problem and not lenient:
        raise SmartpruneError(f"{where}: the box {problem}; correct or delete the entry")
    return None if problem else corners


def _numbers(value: object, where: str, count: int) -> tuple[float, ...]:
    valid = isinstance(value, list) and len(value) == count
    if not valid or not all(type(v) in (int, float) and abs(v) < 1e9 for v in value):  # type: ignore[attr-defined]
        raise SmartpruneError(f"{where} is {str(value)[:60]}; it must be {count} finite number{'s' * (count > 1)}")
    return tuple(float(v) for v in value)  # type: ignore[attr-defined]


def check_detections(data: object, truth: GroundTruth, where: str) -> list[dict[str, Any]]:
    """Checks results in COCO's format: a list of dictionaries with ``image_id``, ``category_id``, ``bbox`` and ``score``."""
    if not isinstance(data, list):
        raise SmartpruneError(f"{where} holds a {type(data).__name__}; it must be a list of detections")
    images, categories = {image.id for image in truth.images}, {number for number, _ in truth.categories}
    out = []
    for number, item in enumerate(data):
        entry = Fields(item, f"{where}: [{number}]")
        image, category = entry.integer("image_id"), entry.integer("category_id")
        if image not in images:
            raise SmartpruneError(f"{entry.where}: image_id {image} is not the id of an image in {truth.where}")
        if category not in categories:
            raise SmartpruneError(f"{entry.where}: category_id {category} is not the id of a category in {truth.where}")
        box = _numbers(entry.raw("bbox"), f"{entry.where}: bbox", 4)
        (score,) = _numbers([entry.raw("score")], f"{entry.where}: score", 1)
        out.append({"image_id": image, "category_id": category, "bbox": list(box), "score": score})
    return out


def load_image(files: ImageFiles, image: AnnotatedImage, size: int) -> Tensor:
    """One image as bytes [size, size, 3]: its longer side is resized to ``size``, and the rest is gray."""
    pixels = files.rgb(image.name)
    if pixels.size != (image.width, image.height):
        raise SmartpruneError(
            f"{files.where(image.name)} has {pixels.size[0]}x{pixels.size[1]} pixels, but its entry "
            f"(id {image.id}) says {image.width}x{image.height}"
        )
    box = Letterbox(image.width, image.height, size)
    if pixels.size != box.inner:
        pixels = pixels.resize(box.inner, resample=2)  # bilinear with antialiasing
    out = np.full((size, size, 3), GRAY, np.uint8)
    (left, top), (width, height) = box.start, box.inner
    out[top : top + height, left : left + width] = np.asarray(pixels)
    return torch.from_numpy(out)


@lru_cache(maxsize=3)
def load_all(path: Path, name: str, size: int, lenient: bool) -> Tensor:
    files = open_images(path, FOLDERS)
    images = load_truth(files, name, lenient).images
    return decode_all(lambda number: load_image(files, images[number], size), len(images))


def _shorten(categories: Sequence[tuple[int, str]]) -> str:
    listed = ", ".join(f"{number} ({name})" for number, name in categories[:10])
    return listed + (f" and {len(categories) - 10} more" if len(categories) > 10 else "")
