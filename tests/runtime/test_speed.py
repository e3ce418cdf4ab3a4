"""The expected speed against the published measurements, and the measurement with a clock of its own."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune.runtime.speed as speed
from smartprune.errors import SmartpruneError

RECORD = Path(__file__).parents[2] / "records" / "runtime-cpu" / "result.json"
NETWORKS = ("resnet18", "resnet50", "mobilenetv2", "bisenetv2", "yolov5m")


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(speed).failed == 0


def test_every_published_speed_of_a_network_is_in_the_expected_range() -> None:
    rows = [row for row in json.loads(RECORD.read_text())["rows"] if row["metric"] == "times faster"]
    checked = 0
    for row in rows:
        name, comma, rest = row["method"].partition(",")
        if comma and "int8" not in rest and name.partition(" ")[0] in NETWORKS:
            expected = speed.expected_speedup(round(1e9 / row["ideal_macs"]), 10**9)
            assert expected is not None
            assert expected.low <= row["mean"] <= expected.high, row
            checked += 1
    assert checked >= 30


def test_larger_reductions_are_faster_and_the_inverse_agrees() -> None:
    before = 0.0
    for kept in (100, 80, 50, 20, 5):
        expected = speed.expected_speedup(kept * 10**6, 10**8)
        assert expected is not None
        assert before < expected.low <= expected.typical <= expected.high
        before = expected.low
        left = speed.macs_left_for(expected.typical)
        assert left is not None
        assert 100 * left == pytest.approx(kept)
    assert speed.expected_speedup(10, 100) is None
    with pytest.raises(SmartpruneError, match=r"kept=11 is outside \[0, 10\]"):
        speed.expected_speedup(11, 10)


def test_fastest_call_is_the_fastest_of_at_least_five(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = [0.0], iter([9.0, 5.0, 3.0, 4.0, 7.0, 6.0])

    def run() -> None:
        now[0] += next(durations)

    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    assert speed.fastest_call(run, 0.0) == 3.0  # the first call warms up
    assert next(durations, None) is None


def test_measurement_leaves_the_models_alone_and_names_the_fastest_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).train()
    pruned = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    seconds = iter([3e-3, 2e-3, 4e-3, 1e-3])

    def call(run: object, limit: float) -> float:
        run()  # type: ignore[operator]
        return next(seconds)

    monkeypatch.setattr(speed, "fastest_call", call)
    result = speed.measure_speed(dense, pruned, torch.randn(1, 4, 5, 5))
    assert (result.engine, result.dense_ms, result.ms, result.speedup) == ("torch channels-last", 2.0, 1.0, 2.0)
    assert dense.training
    assert dense[1].num_batches_tracked == 0
    with pytest.raises(SmartpruneError, match="must be a tensor"):
        speed.measure_speed(dense, pruned, {"x": 1})
