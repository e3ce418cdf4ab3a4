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
    with pytest.raises(SmartpruneError, match=r"pip install 'smartprune\[track\]', or use --tensorboard off"):
        train(small_config(tmp_path / "a", tensorboard="on"))
    assert not (tmp_path / "a").exists()
