"""TensorBoard files of a run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from helpers.training_jobs import (
    StopAfter,
    metric_rows,
    small_config,
)
from smartprune import SmartpruneError
from smartprune.training.trackers import read_id, write_id
from smartprune.training.train import resume, train


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_every_row_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "a"
    with pytest.raises(SmartpruneError, match="stopped in search"):
        train(small_config(out, tensorboard="on", checkpoint_seconds=1000.0), stop=StopAfter(17))
    resume(out, stop=StopAfter(1000))
    rows, events = metric_rows(out), read_events(out)
    at = [7, 14, 21, 28, 35]  # steps of the whole run
    assert events["loss"] == [(step, pytest.approx(row["loss"])) for step, row in zip(at, rows, strict=True)]
    assert [step for step, _ in events["accuracy"]] == at
    assert [step for step, _ in events["tau"]] == [21, 28]
    assert {"lr", "seconds", "undecided"} <= set(events)
    if importlib.util.find_spec("PIL") is not None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        pictures = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0}).Reload()
        assert {"layers", "scores"} <= set(pictures.Tags()["images"])
        (event,) = pictures.Images("layers")
        assert (event.step, event.encoded_image_string[:4]) == (35, b"\x89PNG")


def test_missing_tensorboard_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SmartpruneError, match=r"pip install tensorboard, or use --tensorboard off"):
        train(small_config(tmp_path / "a", tensorboard="on"))
    assert not (tmp_path / "a").exists()


def test_unknown_and_missing_trackers_are_errors_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SmartpruneError, match="there is no tracker 'neptune'; give mlflow, wandb, or mlflow,wandb"):
        train(small_config(tmp_path / "a", track="mlflow,neptune"))
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SmartpruneError, match=rf"track='{name}', but {name} cannot be imported .*pip install {name}, or"):
            train(small_config(tmp_path / "a", track=name))
    assert not (tmp_path / "a").exists()


def test_a_run_keeps_the_names_that_trackers_gave_it(tmp_path: Path) -> None:
    assert read_id(tmp_path, "mlflow") is None
    write_id(tmp_path, "mlflow", "a")
    write_id(tmp_path, "wandb", "b")
    assert [read_id(tmp_path, name) for name in ("mlflow", "wandb")] == ["a", "b"]


class Recorder:
    """Stands in for a tracker."""

    def __init__(self) -> None:
        self.rows: list[object] = []
        self.calls: list[str] = []

    def add(self, row: object) -> None:
        self.rows.append(row)

    def finish(self, folder: Path, step: int) -> None:
        self.calls.append("finish")

    def close(self) -> None:
        self.calls.append("close")


def test_trackers_get_every_row_and_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = [Recorder(), Recorder()]
    monkeypatch.setattr("smartprune.training.run.open_trackers", lambda *_: list(trackers))
    out = tmp_path / "a"
    train(small_config(out))
    for tracker in trackers:
        assert [row["loss"] for row in tracker.rows] == [row["loss"] for row in metric_rows(out)]  # type: ignore[index]
        assert tracker.calls == ["finish", "close"]
