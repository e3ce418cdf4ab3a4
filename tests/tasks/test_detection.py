"""Detection: predictions, batches, settings, and runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.box_folders import CATEGORIES, COUNTS, image_and_boxes, write_boxes
from helpers.detection import CPU, Oracle, make_task
from helpers.image_folders import make_tar
from smartprune import SmartpruneError
from smartprune.tasks import TASKS
from smartprune.tasks.bccd import Bccd
from smartprune.tasks.coco_eval import evaluator
from smartprune.tasks.detection import Detection, select
from smartprune.tasks.sceneboxes import SceneBoxes
from smartprune.training.config import configure
from smartprune.training.train import train

pytest.importorskip("PIL")


def test_a_box_is_a_detection_of_every_class_above_the_confidence() -> None:
    boxes = torch.tensor([[[10.0, 10, 4, 6, 0.5, 0.8, 0.001, 0.6], [30, 30, 4, 4, 0.9, 0.0, 0.0, 1.0]]])
    out = select(boxes, confidence=0.01, overlap=0.6, limit=5)[0]
    torch.testing.assert_close(out[:3, 4], torch.tensor([0.9, 0.4, 0.3]))
    assert out[:3, 5].tolist() == [2, 0, 2]
    assert out[1, :4].tolist() == [8, 7, 12, 13]
    assert not out[3:].any()
    assert not select(torch.zeros(2, 9, 8), 0.001, 0.6, 5).any()


def test_predictions_are_in_pixels_and_ids_of_the_file(tmp_path: Path) -> None:
    task = make_task(write_boxes(tmp_path))
    data = task.data("test", CPU)
    detections = task.predictions(Oracle(data), data)
    expected = []
    for number in range(COUNTS["test"]):
        expected += [
            (100 + 3 * number, CATEGORIES[label][0], box) for label, box, crowd in image_and_boxes("test", number)[1] if not crowd
        ]
    assert len(detections) == len(expected)
    for row in detections:
        assert row["score"] == 0.9
        assert min(
            max(abs(a - b) for a, b in zip(row["bbox"], box, strict=True))
            for image, category, box in expected
            if (image, category) == (row["image_id"], row["category_id"])
        ) < 2e-3  # fmt: skip
    if evaluator() is not None:
        assert task.metric(Oracle(data), data) == task.score(detections, "test")["mAP"] == pytest.approx(1)  # type: ignore[index]


def test_disk_and_memory_give_the_same_batches(tmp_path: Path) -> None:
    write_boxes(tmp_path)
    memory, disk = (make_task(tmp_path, memory=limit).data("train", CPU) for limit in (1.0, 0.0))
    assert disk.store.cached is None  # type: ignore[attr-defined]
    whole, late = list(memory.batches(2, seed=1, epoch=2)), list(disk.batches(2, seed=1, epoch=2, first=1))
    assert len(whole) == 3
    for a, b in zip(whole[1:], late, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_missing_data_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMARTPRUNE_DATA", raising=False)
    with pytest.raises(SmartpruneError, match="bccd: no data folder is given"):
        Bccd().data("train", CPU)
    with pytest.raises(
        SmartpruneError, match=r"voc07sub: .* holds no data for this task; .* the folder annotations, or voc07sub\.tar"
    ):
        TASKS["voc07sub"](folder=str(tmp_path)).data("train", CPU)
    with pytest.raises(SmartpruneError, match="detection: split='dev' is unknown; use train, validation or test"):
        make_task(write_boxes(tmp_path)).data("dev", CPU)
    with pytest.raises(SmartpruneError, match="holds no boxes for the split validation"):
        make_task(write_boxes(tmp_path / "two", test=False)).score([], "validation")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 100}, "detection: size=100 is not a positive multiple of 32"),
        ({"mosaic": 1.5}, "mosaic=1.5 is outside 0 to 1"),
        ({"scale": 1.0}, "scale=1.0 is outside \\[0, 1\\)"),
        ({"overlap": -0.1}, "overlap=-0.1 is outside 0 to 1"),
        ({"most": 0}, "most=0 is too small; use at least 1"),
        ({"memory": -1.0}, "memory=-1.0 is negative"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        Detection(**settings)
    with pytest.raises(SmartpruneError, match="width=0 is too small; use at least 1"):
        SceneBoxes(width=0)


@pytest.mark.parametrize("name", ["detection", "voc07sub"])
def test_yolov5m_trains_on_images_from_a_tar_file(name: str, tmp_path: Path) -> None:
    tar = make_tar(write_boxes(tmp_path / "set"), tmp_path / "set.tar")
    task = TASKS[name](folder=str(tar), size=32)
    torch.manual_seed(0)
    model, batch = task.model("yolov5m"), next(iter(task.data("train", CPU).batches(4, seed=0, epoch=0)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[2] < values[0]
    recipe = task.recipe
    assert (recipe.momentum, recipe.weight_decay, recipe.block, recipe.model) == (0.937, 5e-4, "16x8", "yolov5m")
    assert recipe.sparsity in (0.5, 0.7)


def test_a_run_from_a_tar_file(tmp_path: Path) -> None:
    tar = make_tar(write_boxes(tmp_path / "set"), tmp_path / "bccd.tar")
    short = {"dense_epochs": 1, "search_epochs": 1, "finetune_epochs": 1, "warmup_epochs": 0.0, "batch": 6, "device": "cpu"}
    settings = {"folder": str(tar), "size": 32}
    result = train(configure({"task": "bccd", "task_settings": settings, **short, "threads": 1, "out": str(tmp_path / "run")}))
    assert result.verified
    layers = json.loads((tmp_path / "run/receipt.json").read_text())["layers"]
    assert not any(layer["name"].startswith("detect") for layer in layers)
    assert isinstance(json.loads((tmp_path / "run/detections.json").read_text()), list)
    if evaluator() is not None:
        assert 0 <= result.pruned <= 1  # type: ignore[operator]


def test_bccd_is_read_where_installed() -> None:
    path = Path(os.environ.get("SMARTPRUNE_DATA", ""))
    if not os.environ.get("SMARTPRUNE_DATA") or not any(path.glob("**/bccd.tar")):
        pytest.skip("SMARTPRUNE_DATA does not name a folder with bccd.tar")
    data: Any = Bccd().data("test", CPU)
    assert data.store.cached.shape == (72, 320, 320, 3)
    labels = data.labels[..., 0]
    assert [int((labels == label).sum()) for label in range(3)] == [805, 71, 69]
