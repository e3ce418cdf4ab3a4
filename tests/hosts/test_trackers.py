"""MLflow and Weights & Biases with the real packages, on files alone. What they stored is read back with their own readers."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smartprune.training.config import configure
from smartprune.training.trackers import Tracker, open_trackers

ROWS = [
    {"stage": "dense", "epoch": 1, "step": 5, "loss": 2.0, "seconds": 1.0, "sample": [1, 2], "graph": "off"},
    {"stage": "dense", "epoch": 2, "step": 10, "loss": 1.5, "seconds": 2.0},
    {"stage": "search", "epoch": 1, "step": 5, "loss": 1.25, "tau": 0.5, "seconds": 3.0},
    {"stage": "search", "epoch": 2, "step": 10, "loss": 1.0, "tau": 0.25, "seconds": 4.0},
]
LOSSES = [(5, 2.0), (10, 1.5), (15, 1.25), (20, 1.0)]  # by steps of the whole run


def global_step(stage: str, step: int) -> int:
    return step + {"dense": 0, "search": 10}[stage]


def track(folder: Path, name: str, rows: list[dict[str, Any]], finish: bool = False) -> Tracker:
    """Opens the tracker of a run, adds rows to it and to the run, and closes it."""
    folder.mkdir(exist_ok=True)
    (tracker,) = open_trackers(configure({"task": "digits", "track": name, "out": str(folder)}), folder, global_step)
    for row in rows:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        tracker.add(row)
    if finish:
        (folder / "receipt.json").write_text('{"format": 1}')
        tracker.finish(folder, 20)
    tracker.close()
    return tracker


def test_mlflow_has_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed; run make hosts")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "run"
    track(folder, "mlflow", ROWS[:2])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))  # the last row was not sent
    track(folder, "mlflow", ROWS[3:], finish=True)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("smartprune").experiment_id])
    stored = client.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in stored] == LOSSES
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "tau")] == [15, 20]
    assert run.data.params["task"] == "digits"
    assert run.info.status == "FINISHED"
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["receipt.json"]


def records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B log: a header of 7 bytes, then blocks of 32 KiB with pieces of records, as in the log of LevelDB."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield record
            record = b""


def read_wandb(folder: Path) -> tuple[list[tuple[int, float]], list[str]]:
    """The losses and the saved files in the log of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    losses, files = [], []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if "loss" in items:
            losses.append((items["_step"], items["loss"]))
        files += [file.path for file in record.files.files]
    return losses, files


def wait_for_wandb(folder: Path, rows: int) -> tuple[list[tuple[int, float]], list[str]]:
    """Another process writes the log, and may still do so after the run was closed."""
    for _ in range(300):
        losses, files = read_wandb(folder)
        if len(losses) >= rows and files:
            break
        time.sleep(0.1)
    return losses, files


def test_wandb_has_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; run make hosts")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    track(folder, "wandb", ROWS[:2])
    assert wait_for_wandb(folder, 2)[0] == LOSSES[:2]
    track(folder, "wandb", ROWS[2:], finish=True)
    losses, files = wait_for_wandb(folder, 4)
    assert losses == LOSSES
    assert "receipt.json" in files
    assert list(json.loads((folder / "trackers.json").read_text())) == ["wandb"]
