"""Fixtures of all tests. Tests use one thread, because two threads are many times slower on a busy machine."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

from smartprune.runtime.choice import Timing

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write ONNX files only on request, because loading the exporter takes longer than most tests."""
    monkeypatch.setattr("smartprune.training.outputs.missing_packages", lambda: ["onnx"])


@pytest.fixture(autouse=True)
def _kernels_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate() runs the kernels without timing them, so that tests do not depend on the load of the machine."""
    monkeypatch.setattr("smartprune.runtime.choice.time_both", lambda kernels, torch: Timing(0.0, 1.0))
