"""Which engines are available, and why others are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from smartprune import SmartpruneError
from smartprune.experiments.bench.engines import CPU, available_engines
from smartprune.experiments.bench.result import Bench, Timing
from smartprune.experiments.bench.run import bench


def hide_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes these engine packages look absent and the others installed, on a machine without a GPU."""
    find_spec: Callable[..., object] = importlib.util.find_spec

    def find(name: str, *args: str) -> object:
        return (None if name in packages else name) if name.startswith(("onnx", "openvino")) else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def lines_below_table(left_out: dict[str, str]) -> list[str]:
    lines = str(Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 2.0, (2.0,), 0.0),), (), left_out, {})).splitlines()
    return lines[lines.index("torch   2.000      1.00  0.0e+00") + 3 :]


def test_engines_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch)
    names, left_out = available_engines()
    assert names == list(CPU)
    assert lines_below_table(left_out) == ["left out: GPU: torch finds no CUDA device"]
    hide_packages(monkeypatch, "openvino")
    names, left_out = available_engines()
    assert names == [name for name in CPU if not name.startswith("openvino")]
    assert lines_below_table(left_out) == ["left out: openvino: not installed; GPU: torch finds no CUDA device"]
    hide_packages(monkeypatch, "onnxscript")
    names, left_out = available_engines()
    assert names == ["torch", "torch channels-last", "smartprune", "smartprune int8"]
    assert lines_below_table(left_out) == [
        "left out: onnxruntime, openvino: onnxscript not installed; GPU: torch finds no",
        "  CUDA device",
    ]
    assert lines_below_table({"onnxruntime int8": "too coarse"}) == ["left out: onnxruntime int8: too coarse"]


def test_choosing_only_unavailable_engines_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "openvino")
    for name, reason in (("openvino int8", "openvino: not installed"), ("torch cuda bf16", "GPU: torch finds no CUDA device")):
        with pytest.raises(SmartpruneError, match=f"bench: {name} cannot be timed on this machine; left out: .*{reason}"):
            bench(nn.Linear(16, 16), torch.zeros(1, 16), only=[name])


def test_an_unknown_engine_raises() -> None:
    with pytest.raises(SmartpruneError, match="bench: unknown engine 'tvm'; choose from: torch, "):
        bench(nn.Linear(16, 16), torch.zeros(1, 16), only=["tvm"])
