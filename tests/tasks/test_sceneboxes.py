"""Detection of digits in scenes: boxes, and runs with and without an evaluator."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.training_jobs import assert_same_run, metric_rows
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.compare import compare
from smartprune.tasks.coco_eval import evaluator
from smartprune.tasks.sceneboxes import ground_truth
from smartprune.tasks.scenes import SCENES, compose
from smartprune.training.config import configure
from smartprune.training.result import Result
from smartprune.training.train import resume, train


def test_boxes_of_scenes_enclose_the_digits() -> None:
    for split in SCENES:
        scenes, truth = compose(split, 0), ground_truth(split, 0)
        assert {label for image in truth.images for label in image.classes} == set(range(10))
        for scene, image in zip(scenes, truth.images, strict=True):
            assert 2 <= len(image.boxes) <= 4
            mask = scene[..., 3].clone()
            for (x1, y1, x2, y2), label in zip(image.boxes, image.classes, strict=True):
                inner = mask[int(y1) : int(y2), int(x1) : int(x2)]
                assert inner.unique().tolist() in ([0, label + 1], [label + 1])
                assert all(side.any() for side in (inner[0], inner[-1], inner[:, 0], inner[:, -1]))  # the box is tight
                inner.zero_()
            assert not mask.any()


@pytest.fixture
def few_scenes(monkeypatch: pytest.MonkeyPatch) -> Any:
    for split, count in (("train", 48), ("validation", 12), ("test", 12)):
        monkeypatch.setitem(SCENES, split, count)
    compose.cache_clear(), ground_truth.cache_clear()
    yield
    compose.cache_clear(), ground_truth.cache_clear()


SHORT = {"task": "sceneboxes", "dense_epochs": 8, "search_epochs": 1, "finetune_epochs": 4, "batch": 8, "device": "cpu"}


@pytest.mark.usefixtures("few_scenes")
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    result = train(configure({**SHORT, "out": str(tmp_path / "a")}))
    assert (result.measure, result.verified) == ("mAP", True)
    steps = iter(range(100))
    with pytest.raises(SmartpruneError, match="stopped in search, after step 2 of 6"):
        train(configure({**SHORT, "out": str(tmp_path / "b")}), stop=lambda: next(steps) == 49)
    assert resume(tmp_path / "b").also == result.also
    assert_same_run(tmp_path / "a", tmp_path / "b")
    for name in ("dense_detections.json", "detections.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    if evaluator() is not None:
        assert [row["mAP"] is None for row in metric_rows(tmp_path / "a")] == [False] * 13  # the search has a metric, too
        assert set(result.also) == {"dense", "pruned"}
        assert result.also["pruned"]["mAP@.5"] > result.pruned > 0  # type: ignore[operator]


@pytest.mark.usefixtures("few_scenes")
def test_a_run_without_an_evaluator_can_be_scored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        for name in ("faster_coco_eval", "pycocotools", "pycocotools.coco"):
            patch.setitem(sys.modules, name, None)
        result = train(configure({**SHORT, "out": str(folder)}))
        assert (result.dense, result.pruned, result.verified) == (None, None, True)
        assert result == Result.load(folder) == resume(folder)
        assert all(row["mAP"] is None for row in metric_rows(folder))
        assert "not scored yet, because a package for scoring is not installed" in result.metrics_line("pruned")
        assert main(["train", "--resume", "--out", str(folder)]) == 0
        assert f"smartprune eval {folder}" in capsys.readouterr().out
        with pytest.raises(SmartpruneError, match="dense is not scored yet; score it with: smartprune eval"):
            compare([folder])
        for words in ([str(folder)], [str(folder / "model.safetensors")]):
            assert main(["eval", *words]) == 1
            assert "mAP needs faster-coco-eval or pycocotools, and neither is installed" in capsys.readouterr().err
    if evaluator() is None:
        pytest.skip("neither faster-coco-eval nor pycocotools is installed")
    damaged = (folder / "detections.json").read_text()
    (folder / "detections.json").write_text(damaged.replace('"image_id": 0', '"image_id": 99'))
    assert main(["eval", str(folder)]) == 1
    assert "detections.json: the predictions: [0]: image_id 99 is not the id of an image" in capsys.readouterr().err
    assert Result.load(folder) == result
    (folder / "detections.json").write_text(damaged)
    for name in ("model", "dense"):  # scoring saved detections needs no weights
        (folder / f"{name}.safetensors").rename(tmp_path / name)
    assert main(["eval", str(folder), "--json"]) == 0
    for name in ("model", "dense"):
        (tmp_path / name).rename(folder / f"{name}.safetensors")
    results = json.loads(capsys.readouterr().out)["results"]
    after = Result.load(folder)
    assert [row["figures"]["mAP"] for row in results] == [after.dense, after.pruned]
    assert after.also["pruned"]["mAP@.5"] == results[1]["figures"]["mAP@.5"]
    assert compare([folder]).runs[0].pruned == after.pruned
    direct = train(configure({**SHORT, "out": str(tmp_path / "direct")}))
    assert (direct.dense, direct.pruned, direct.also) == (after.dense, after.pruned, after.also)
    for more, value in (([], after.pruned), (["--dense"], after.dense)):  # already scored, so the models are evaluated again
        assert main(["eval", str(folder), "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["figures"]["mAP"] == value
