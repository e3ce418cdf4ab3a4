"""The log of a run: stages, rows, scores and benchmark times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from helpers.training_jobs import small_config
from smartprune.artifacts.receipt import Receipt
from smartprune.reports.figures import threshold
from smartprune.reports.runlog import RunLog, read_rows, read_run_log, sampled_blocks
from smartprune.training.train import train


def test_steps_of_the_run_count_all_earlier_stages() -> None:
    rows = tuple(
        {"stage": stage, "epoch": e, "step": 10 * e} for stage, n in (("dense", 3), ("search", 2)) for e in range(1, n + 1)
    )
    log = RunLog(Path("."), {"dense_epochs": 3, "search_epochs": 4, "finetune_epochs": 2, "dense": None}, None, rows)
    assert [log.stage_steps(stage) for stage in ("dense", "search", "finetune")] == [30, 40, 20]
    assert log.run_step("finetune", 5) == 75
    given = RunLog(Path("."), {**log.config, "dense": "dense.safetensors"}, None, rows[3:])
    assert given.run_step("search", 5) == 5


@pytest.mark.parametrize("method", ["smart", "gradual", "magnitude"])
def test_scores_of_a_run_explain_its_mask(tmp_path: Path, method: str) -> None:
    pytest.importorskip("sklearn")
    train(small_config(tmp_path / "run", method=method, dense_epochs=1, finetune_epochs=1))
    scores = load_file(tmp_path / "run" / "scores.safetensors")["scores"].numpy()
    mask = Receipt.load(tmp_path / "run" / "receipt.json").mask().numpy()
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: int(mask.sum())]
    assert sorted(best) == np.flatnonzero(mask).tolist()
    border = threshold(scores, mask)
    assert border is not None
    assert scores[mask].min() >= border >= scores[~mask].max()
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["stage"] == "search"]
    places = sampled_blocks(len(mask))
    assert [len(row["sample"]) for row in rows] == [len(places)] * len(rows)
    assert rows[-1]["sample"] == mask[places].astype(float).tolist()  # the mask is hard at the end
    assert all(0 <= value <= 1 for row in rows for value in row["sample"])


def test_engine_times_are_read_from_the_benchmark(tmp_path: Path) -> None:
    rows = [("torch", 4.0), ("onnxruntime", 2.0), ("smartprune", 0.5), ("onnxruntime int8", 0.9), ("smartprune int8", 0.25)]
    timings = [{"engine": name, "batch": 1, "ms": ms, "failed": None} for name, ms in rows]
    timings += [{"engine": "openvino", "batch": 1, "ms": 0.1, "failed": "off"}, {"engine": "torch", "batch": 8, "ms": 0.01}, 7]
    (tmp_path / "bench.json").write_text(json.dumps({"timings": timings}))
    assert read_run_log(tmp_path).engine_times() == dict(rows)
    for damaged in (
        "[]",
        "{",
        json.dumps({"timings": {"a": 1}}),
        json.dumps({"timings": [{"engine": "torch", "batch": 1, "ms": "x"}]}),
    ):
        (tmp_path / "bench.json").write_text(damaged)
        assert read_run_log(tmp_path).engine_times() == {}
