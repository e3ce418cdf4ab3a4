"""Engines in their own processes, timed in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from smartprune import SmartpruneError
from smartprune.experiments.bench.result import Timing
from smartprune.experiments.bench.run import EngineProcess, bench, time_in_turns, write_case

pytestmark = pytest.mark.timeout(600)


def test_an_engine_without_its_file_fails(tmp_path: Path) -> None:
    torch.save((nn.Linear(3, 2), torch.zeros(1, 3), []), tmp_path / "case.pt")
    engine = EngineProcess("onnxruntime", tmp_path, 1)
    assert engine.failed is not None
    engine.close()


def test_the_tolerance_reaches_the_process_of_an_engine(tmp_path: Path) -> None:
    torch.save((nn.Linear(3, 2), torch.ones(1, 3), []), tmp_path / "case.pt")
    engine = EngineProcess("torch", tmp_path, 1, tolerance=-1.0)
    engine.close()
    assert engine.failed == "SmartpruneError: its outputs are off by 0; -1 is allowed"


class FakeEngine:
    """Records the order of requests."""

    name, error, failed = "smartprune", 0.25, None

    def __init__(self, ms: float, requests: list[float]) -> None:
        self.ms, self.requests = ms, requests

    def request(self, message: dict[str, float]) -> dict[str, float]:
        self.requests.append(self.ms)
        return {"ms": self.ms + len(self.requests)}


def test_engines_take_turns_in_rotating_order() -> None:
    requests: list[float] = []
    group: list[Any] = [FakeEngine(ms, requests) for ms in (10.0, 20.0, 30.0)]
    group[1].failed = "off"
    timings = time_in_turns(group, 4, 3, 0.1)
    assert requests == [10, 30, 30, 10, 30, 10]
    assert timings[0] == Timing("smartprune", 4, 11.0, (11.0, 14.0, 16.0), 0.25)
    assert timings[1] == Timing("smartprune", 4, 0.0, (), 0.25, "off")
    assert timings[2] == Timing("smartprune", 4, 32.0, (32.0, 33.0, 35.0), 0.25)


def test_onnxruntime_and_openvino_are_timed_where_they_are_installed() -> None:
    for package in ("openvino", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 10))
    inputs = [torch.randn(2, 8, 6, 6) for _ in range(4)]
    names = ("torch", "onnxruntime", "openvino", "onnxruntime int8", "openvino int8")
    result = bench(model, inputs[0][:1], batches=(2,), rounds=2, seconds=0.01, calibration=inputs, only=names)
    assert [timing.engine for timing in result.timings] == list(names)
    assert all(timing.failed is None and timing.ms > 0 and len(timing.rounds) == 2 for timing in result.timings), result.timings
    errors = {timing.engine: timing.error for timing in result.timings}
    assert errors["openvino"] < 1e-5
    assert 1e-5 < errors["openvino int8"] < 0.1  # a float32 engine would be more exact
    assert result.left_out == {}
    assert result.versions["openvino"]


def test_engines_without_an_exported_model_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise SmartpruneError("no\nmore")

    monkeypatch.setattr("smartprune.experiments.bench.run.export_onnx", refuse)
    names = ["torch", "onnxruntime", "openvino int8"]
    left_out = write_case(nn.Linear(16, 16), torch.zeros(1, 16), [], tmp_path, names, "16x8")
    assert left_out == {"onnxruntime": "no", "openvino int8": "no"}
    assert [path.name for path in tmp_path.iterdir()] == ["case.pt"]
