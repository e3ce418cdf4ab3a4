"""``smartprune eval``: its scores, its arguments and their errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from helpers.box_folders import write_boxes
from helpers.detection import CPU, Oracle, make_task, needs_evaluator
from smartprune.cli import main
from smartprune.training.config import configure
from smartprune.training.train import train

pytest.importorskip("PIL")


@needs_evaluator
def test_eval_scores_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = make_task(write_boxes(tmp_path / "set"))
    data, boxes = task.data("test", CPU), tmp_path / "set/annotations/instances_test.json"
    results = tmp_path / "results.json"
    results.write_text(json.dumps(task.predictions(Oracle(data), data)))
    assert main(["eval", "--detections", str(results), "--annotations", str(boxes)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  mAP     100.00 %", "  mAP@.5  100.00 %"]
    results.write_text("[{}]")
    assert main(["eval", "--detections", str(results), "--annotations", str(boxes)]) == 1
    assert "results.json: [0]: image_id is missing" in capsys.readouterr().err


def test_eval_of_runs_and_weights_and_invalid_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    settings = {
        "dense_epochs": 1,
        "search_epochs": 1,
        "finetune_epochs": 1,
        "task_settings": {"width": 4},
        "block": "4x2",
        "device": "cpu",
    }
    result = train(configure({**settings, "out": str(folder)}))
    for arguments, value in (([str(folder)], result.pruned), ([str(folder), "--dense"], result.dense)):
        assert main(["eval", *arguments, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["task"], data["split"], data["figures"]) == ("digits", "test", {"accuracy": value})
    weights = shutil.copy(folder / "model.safetensors", tmp_path / "alone.safetensors")
    assert main(["eval", str(weights), "--task", "digits", "--task-set", "width=4", "--split", "validation"]) == 0
    assert "alone.safetensors (digits, resnet8, validation)" in capsys.readouterr().out
    assert main(["eval", str(weights), "--task", "digits"]) == 1
    assert "does not fit the model" in capsys.readouterr().err
    for arguments, message in (
        ([], "give either a run folder or a .safetensors file"),
        ([str(weights)], "is not in a run folder; give its task"),
        ([str(tmp_path)], "holds no run"),
        ([str(tmp_path / "none.safetensors")], "does not exist"),
        ([str(weights), "--dense"], "--dense is for run folders"),
        (["--detections", "a.json"], "--detections and --annotations are only used together; give both"),
        (
            ["--detections", "a.json", "--annotations", "b.json", "--task-set", "size=64"],
            "--task-set is not used with --detections",
        ),
        ([str(folder), "--device", "tpu"], "device='tpu' must be one of auto, cpu, cuda"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", *arguments])
        assert message in capsys.readouterr().err
