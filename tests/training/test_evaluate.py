"""Evaluation of a model on a split of its task."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.plain_task import PlainTask
from smartprune.errors import SmartpruneError
from smartprune.training.evaluate import evaluate, write_detections

CPU = torch.device("cpu")


def test_metric_is_that_of_the_model_in_eval_mode() -> None:
    task = PlainTask()
    model = nn.Sequential(task.model(task.models[0]), nn.Dropout(1.0)).train()  # in training it would return zeros
    metrics, detections, samples = evaluate(task, model, "test", CPU)
    assert model.training
    assert detections is None
    assert samples == task.data("test", CPU).steps(1) > 0
    with torch.no_grad():
        model.eval()
        assert metrics == {task.measure: task.metric(model, task.data("test", CPU))}


def test_mode_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    task = PlainTask()
    model = task.model(task.models[0]).train()

    def fail(self: object, model: nn.Module, data: object) -> float:
        raise ValueError("no metric")

    monkeypatch.setattr(PlainTask, "metric", fail)
    with pytest.raises(ValueError, match="no metric"):
        evaluate(task, model, "test", CPU)
    assert model.training


def test_training_data_without_still_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = PlainTask()
    model = task.model(task.models[0])
    assert evaluate(task, model, "train", CPU)[0].keys() == {task.measure}
    monkeypatch.setattr(PlainTask, "data", lambda self, split, device: SimpleNamespace(batches=None, steps=None))
    with pytest.raises(SmartpruneError, match=r"PlainTask: its training split has no still\(\)"):
        evaluate(task, model, "train", CPU)


def test_detections_are_one_per_line(tmp_path: Path) -> None:
    detections = [{"image_id": 1, "score": 0.5}, {"image_id": 2, "score": 0.25}]
    write_detections(tmp_path / "detections.json", detections)
    text = (tmp_path / "detections.json").read_text()
    assert json.loads(text) == detections
    assert len(text.splitlines()) == 2 + len(detections)
    write_detections(tmp_path / "detections.json", [])
    assert json.loads((tmp_path / "detections.json").read_text()) == []
