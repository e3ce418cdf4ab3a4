"""Annotation files: layouts, and errors that name the file and the entry."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.box_folders import COUNTS, edit_annotations, image_and_boxes, write_boxes
from helpers.detection import CPU, make_task
from helpers.image_folders import make_tar, save_image
from smartprune import SmartpruneError
from smartprune.tasks.detection_files import check_detections, parse_annotations

pytest.importorskip("PIL")


@pytest.mark.parametrize("year", ["", "2017"])
@pytest.mark.parametrize("as_tar", [False, True])
def test_every_layout_is_read(as_tar: bool, year: str, tmp_path: Path) -> None:
    path = write_boxes(tmp_path / "set", test=not year, year=year)
    task = make_task(make_tar(path, tmp_path / "set.tar") if as_tar else path)
    for split, folder in (("train", "train"), ("validation", None if year else "val"), ("test", "val" if year else "test")):
        data = task.data(split, CPU)
        if folder is None:
            assert data.steps(4) == 0
            assert list(data.batches(4, seed=0, epoch=0)) == []
            continue
        images = [image_and_boxes(folder, number) for number in range(COUNTS[folder])]
        assert len(data.truth.images) == len(images)  # type: ignore[attr-defined]
        for (values, objects), entry in zip(images, data.truth.images, strict=True):  # type: ignore[attr-defined]
            assert (entry.height, entry.width) == values.shape[:2]
            assert list(entry.classes) == [label for label, _, _ in objects]
            assert [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in entry.boxes] == [box for _, box, _ in objects]
            assert list(entry.crowd) == [bool(crowd) for _, _, crowd in objects]
        count = int((data.labels[..., 0] >= 0).sum())  # type: ignore[attr-defined]
        assert count == sum(not crowd for _, objects in images for _, _, crowd in objects)


def set_box(key: str, value: Any, index: int = 2) -> Callable[[Path], None]:
    return lambda folder: edit_annotations(folder, lambda data: data["annotations"][index].update({key: value}))


def set_image(key: str, value: Any, index: int = 1) -> Callable[[Path], None]:
    return lambda folder: edit_annotations(folder, lambda data: data["images"][index].update({key: value}))


TRAIN = r"instances_train\.json"


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no area": (
        set_box("bbox", [3, 4, 0, 5]),
        TRAIN + r": annotations\[2\] \(id \d+\): the box has no area \(0 x 5\); correct or delete",
    ),
    "negative size": (set_box("bbox", [3, 4, 5, -2]), r"annotations\[2\] .*has no area \(5 x -2\)"),
    "beyond": (set_box("bbox", [3, 4, 500, 5]), r"annotations\[2\].* extends beyond \d+\.png, which has \d+x\d+ pixels"),
    "before": (set_box("bbox", [-3, 4, 5, 5]), r"annotations\[2\].* extends beyond"),
    "outside": (set_box("bbox", [-0.9, 4, 0.5, 5]), r"annotations\[2\].* lies outside of"),
    "three numbers": (set_box("bbox", [3, 4, 5]), r"annotations\[2\].*bbox is \[3, 4, 5\]; it must be 4 finite numbers"),
    "a text": (set_box("bbox", [3, 4, "5", 6]), r"annotations\[2\].*bbox is .*; it must be 4 finite numbers"),
    "not a number": (set_box("bbox", [3, float("nan"), 5, 6]), r"not readable as JSON \(NaN is not a JSON number\)"),
    "area": (set_box("area", True), r"annotations\[2\].*area is .*True.*; it must be 1 finite number"),
    "crowd": (set_box("iscrowd", 2), r"annotations\[2\]: iscrowd is 2; it must be an integer from 0 to 1"),
    "category": (
        set_box("category_id", 5),
        r"annotations\[2\] .*category_id 5 is unknown; the categories are 4 \(red\), 7 \(green\), 90 \(blue\)",
    ),
    "image": (set_box("image_id", 5), r"annotations\[2\] .*image_id 5 is not the id of an image"),
    "same id": (set_box("id", 1000), r"annotations\[2\]: id 1000 is used twice in annotations"),
    "same image id": (set_image("id", 100), r"images\[1\]: id 100 is used twice in images"),
    "same file": (set_image("file_name", "000.png"), r"000\.png is listed twice, the second time with id 103"),
    "no such file": (set_image("file_name", "gone.png"), r"lists gone\.png \(id 103\), but .*images/train/gone\.png is missing"),
    "other size": (set_image("width", 77), r"images/train/001\.png has 30x44 pixels, but its entry \(id 103\) says 77x44"),
    "no width": (lambda p: edit_annotations(p, lambda data: data["images"][1].pop("width")), r"images\[1\]: width is missing"),
    "no box": (
        lambda p: edit_annotations(p, lambda data: data["annotations"][2].pop("bbox")),
        r"annotations\[2\]: bbox is missing",
    ),
    "no category": (
        lambda p: edit_annotations(p, lambda data: data["annotations"][2].pop("category_id")),
        r"annotations\[2\]: category_id is missing",
    ),
    "same category": (
        lambda p: edit_annotations(p, lambda data: data["categories"][1].update(id=4)),
        r"categories\[1\]: id 4 is used twice in categories",
    ),
    "no images": (lambda p: edit_annotations(p, lambda data: data.update(images=[], annotations=[])), TRAIN + " lists no images"),
    "crowds only": (
        lambda p: edit_annotations(p, lambda data: [box.update(iscrowd=1) for box in data["annotations"]]),
        TRAIN + " holds no boxes except crowds; nothing to train on",
    ),
    "no list": (lambda p: (p / "annotations/instances_train.json").unlink(), TRAIN + " is missing; it holds the boxes"),
    "cut off": (lambda p: (p / "annotations/instances_train.json").write_text('{"images": ['), TRAIN + ": not readable as JSON"),
    "a list": (
        lambda p: (p / "annotations/instances_train.json").write_text("[]"),
        TRAIN + " is a list of 0; it must be a dictionary",
    ),
    "damaged image": (lambda p: (p / "images/train/002.png").write_bytes(b"no"), r"train/002\.png cannot be read as an image"),
    "missing image": (lambda p: (p / "images/train/002.png").unlink(), r"lists 002\.png \(id 106\), but .*002\.png is missing"),
    "missing images": (lambda p: shutil.rmtree(p / "images/train"), r"lists 000\.png \(id 100\), but .* is missing"),
    "no entry": (
        lambda p: save_image(p / "images/train/more.png", np.zeros((9, 9, 3), np.uint8)),
        r"images/train/more\.png has no entry in annotations/instances_train\.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_errors_name_the_file_and_the_entry(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    damage(write_boxes(tmp_path))
    with pytest.raises(SmartpruneError, match=message):
        make_task(tmp_path).data("train", CPU)


def test_splits_with_different_categories_raise(tmp_path: Path) -> None:
    edit_annotations(write_boxes(tmp_path), lambda data: data["categories"][0].update(name="pink"), "test")
    with pytest.raises(
        SmartpruneError, match=r"instances_test\.json has the categories 4 \(pink\).*instances_train\.json has 4 \(red\)"
    ):
        make_task(tmp_path).data("test", CPU)


def test_lenient_drops_invalid_boxes_and_clips_rounding(tmp_path: Path) -> None:
    write_boxes(tmp_path)
    count = len(json.loads((tmp_path / "annotations/instances_train.json").read_text())["annotations"])
    set_box("bbox", [3, 4, 0, 5])(tmp_path)
    set_box("bbox", [-0.5, 3, 10, 5], 1)(tmp_path)
    truth = make_task(tmp_path, lenient=True).data("train", CPU).truth  # type: ignore[attr-defined]
    boxes = [box for image in truth.images for box in image.boxes]
    assert len(boxes) == count - 1
    assert (0.0, 3.0, 9.5, 8.0) in boxes


def test_detections_are_checked(tmp_path: Path) -> None:
    truth = parse_annotations((write_boxes(tmp_path) / "annotations/instances_test.json").read_bytes(), "boxes")
    valid = {"image_id": 100, "category_id": 7, "bbox": [1, 2, 3, 4], "score": 0.5}
    assert check_detections([{**valid, "more": 1}], truth, "results") == [{**valid, "bbox": [1.0, 2.0, 3.0, 4.0]}]
    for data, message in (
        ({}, "results holds a dict; it must be a list"),
        ([valid, 3], r"results: \[1\] is 3; it must be a dictionary"),
        ([{**valid, "image_id": 1}], r"results: \[0\]: image_id 1 is not the id of an image in boxes"),
        ([{**valid, "category_id": 1}], r"results: \[0\]: category_id 1 is not the id of a category"),
        ([{**valid, "score": None}], r"results: \[0\]: score is \[None\]"),
        ([{**valid, "bbox": [1, 2, 3]}], r"results: \[0\]: bbox is \[1, 2, 3\]"),
    ):
        with pytest.raises(SmartpruneError, match=message):
            check_detections(data, truth, "results")
