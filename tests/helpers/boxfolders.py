"""Small made-up pictures with boxes in COCO's form, in which the colour of every box tells its class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.folders import Bytes, save

COLOURS = ((250, 10, 10), (10, 250, 10), (10, 10, 250))
CATEGORIES = ((4, "red"), (7, "green"), (90, "blue"))  # ids are not in a row
COUNTS = {"train": 6, "val": 3, "test": 4}


def boxed(split: str, number: int) -> tuple[Bytes, list[tuple[int, list[float], int]]]:
    """A grey picture with one to three filled boxes; (class, x y w h, crowd) of each. Some are wide and some are high."""
    draw = np.random.default_rng((len(split), number))
    width, height = ((48, 32), (30, 44), (40, 40))[number % 3]
    picture = np.full((height, width, 3), 60, np.uint8)
    objects = []
    for place in range(int(draw.integers(1, 4))):
        left, wide = 1 + place * (width // 3), int(draw.integers(6, width // 3 - 1))
        top, high = int(draw.integers(0, height - 16)), int(draw.integers(6, 16))
        label = int(draw.integers(3))
        picture[top : top + high, left : left + wide] = COLOURS[label]
        objects.append((label, [float(left), float(top), float(wide), float(high)], int(place == 2)))
    return picture, objects


def write_boxes(folder: Path, train: int = COUNTS["train"], test: bool = True, year: str = "") -> Path:
    """``year`` "2017" gives the layout of COCO itself."""
    for split, count in {**COUNTS, "train": train, "test": COUNTS["test"] * test}.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(count):
            picture, objects = boxed(split, number)
            save(folder / (split + year if year else f"images/{split}") / f"{number:03}.png", picture)
            owner = 100 + 3 * number
            images.append({"id": owner, "file_name": f"{number:03}.png", "width": picture.shape[1], "height": picture.shape[0]})
            annotations += [
                {
                    "id": 10 * owner + place,
                    "image_id": owner,
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


def change(folder: Path, work: Callable[[dict[str, Any]], None], split: str = "train") -> None:
    """Changes the boxes of a split."""
    path = folder / f"annotations/instances_{split}.json"
    data = json.loads(path.read_text())
    work(data)
    path.write_text(json.dumps(data))
