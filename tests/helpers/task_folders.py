"""A data folder with small data for every task."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.box_folders import write_boxes
from helpers.cifar10_folders import write_binary
from helpers.image_folders import make_tar, write_classes, write_pairs

SETTINGS: dict[str, dict[str, int]] = {  # task settings that fit the small images
    "imagefolder": {"size": 16},
    "camvid": {"height": 32, "width": 32},
    "segmentation": {"height": 32, "width": 32},
    "bccd": {"size": 32},
    "voc07sub": {"size": 32},
    "detection": {"size": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("PIL")
    folder = write_binary(tmp_path_factory.mktemp("data"))
    write_classes(folder / "imagenette128", train=100)
    make_tar(write_pairs(folder / "pairs", train=300), folder / "camvid.tar")
    write_pairs(folder / "cityscapes", city=True, train=300)
    boxes = write_boxes(folder / "coco", train=300)
    for name in ("bccd", "voc07sub"):
        make_tar(boxes, folder / f"{name}.tar")
    return folder
