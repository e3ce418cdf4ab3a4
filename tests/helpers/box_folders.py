"""Writes small COCO data sets in which the colour of a box is its class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.image_folders import ByteArray, save_image

COLORS = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
CATEGORIES = ((4, "red"), (7, "green"), (90, "blue"))  # the ids have gaps
COUNTS = {"train": 6, "val": 3, "test": 4}


def image_and_boxes(split: str, number: int) -> tuple[ByteArray, list[tuple[int, list[float], int]]]:
    """A grey image of one of three shapes with one to three filled boxes, and (class, [x, y, w, h], crowd) of each box."""
    rng = np.random.default_rng((len(split), number))
    width, height = ((48, 32), (30, 44), (40, 40))[number % 3]
    image = np.full((height, width, 3), 60, np.uint8)
    objects = []
    for place in range(int(rng.integers(1, 4))):
        left, wide = 1 + place * (width // 3), int(rng.integers(6, width // 3 - 1))
        top, high = int(rng.integers(0, height - 16)), int(rng.integers(6, 16))
        label = int(rng.integers(3))
        image[top : top + high, left : left + wide] = COLORS[label]
        objects.append((label, [float(left), float(top), float(wide), float(high)], int(place == 2)))
    return image, objects


def write_boxes(folder: Path, train: int = COUNTS["train"], test: bool = True, year: str = "") -> Path:
    """Writes images and annotations. ``year="2017"`` gives the layout of COCO itself."""
    for split, count in {**COUNTS, "train": train, "test": COUNTS["test"] * test}.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            image, objects = image_and_boxes(split, number)
            save_image(folder / (split + year if year else f"images/{split}") / f"{number:03}.png", image)
            image_id = 100 + 3 * number
            images.append({"id": image_id, "file_name": f"{number:03}.png", "width": image.shape[1], "height": image.shape[0]})
            annotations += [
                {
                    "id": 10 * image_id + place,
                    "image_id": image_id,
                    "category_id": CATEGORIES[label][0],
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": crowd,
                }
                for place, (label, box, crowd) in enumerate(objects)
            ]
        if count:
            categories = [{"id": number, "name": name} for number, name in CATEGORIES]
            path = folder / f"annotations/instances_{split}{year}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return folder


def edit_annotations(folder: Path, edit: Callable[[dict[str, Any]], None], split: str = "train") -> None:
    """Applies ``edit`` to the annotations of a split."""
    path = folder / f"annotations/instances_{split}.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
