"""Steps as CUDA graphs, and runs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cifar10_folders import write_binary
from helpers.training_jobs import (
    ALL_OPTIONS,
    metric_rows,
    small_config,
)
from smartprune import METHODS, SmartpruneError
from smartprune.methods import capabilities
from smartprune.training.config import Config, configure
from smartprune.training.result import Result
from smartprune.training.train import resume, train

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_methods_say_whether_their_search_can_be_captured() -> None:
    reasons = {name: capabilities(method()).why_not_capturable for name, method in METHODS.items()}
    assert [name for name, reason in reasons.items() if reason is None] == ["smart", "magnitude", "gradual"]
    assert "decides on the host" in str(reasons["acdc"])
    assert "mask_type='stochastic'" in str(capabilities(METHODS["smart"](mask_type="stochastic")).why_not_capturable)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("pictures"))


def job(folder: Path, out: Path, **changes: Any) -> Config:
    settings = {"task": "cifar10", "task_settings": {"folder": str(folder)}, "batch": 20, "device": "cuda", "amp": "off"}
    lengths = {"dense_epochs": 1, "search_epochs": 2, "finetune_epochs": 1, "lr": 0.02, "checkpoint_seconds": 1000.0}
    return configure({**settings, **lengths, "out": str(out), **changes})


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["smart", "gradual"])
def test_graph_matches_python(method: str, folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": method, "sparsity": 0.5}
    for graph in ("off", "on"):
        train(job(folder, tmp_path / graph, graph=graph, **changes))
    for a, b in zip(metric_rows(tmp_path / "off"), metric_rows(tmp_path / "on"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.1)
        assert b["lr"] == pytest.approx(a["lr"])
        if a["stage"] == "search":
            assert b["undecided"] == pytest.approx(a["undecided"], rel=0.1, abs=50)
            assert sum(b["kept"].values()) == pytest.approx(sum(a["kept"].values()), rel=0.02)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stop_at", [15, 30, 65])
def test_run_with_graphs_resumes(stop_at: int, folder: Path, tmp_path: Path) -> None:
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls == stop_at

    with pytest.raises(SmartpruneError, match="stopped in"):
        train(job(folder, tmp_path / "a", graph="on", amp="bf16"), stop=stop)
    assert resume(tmp_path / "a") == Result.load(tmp_path / "a")
    assert len(metric_rows(tmp_path / "a")) == 4


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_a_gpu(method: str, folder: Path, tmp_path: Path) -> None:
    assert train(job(folder, tmp_path / "a", method=method, sparsity=0.5, amp="bf16")).verified


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["off", "on"])
def test_deterministic_runs_on_a_gpu_are_bit_identical(graph: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(small_config(tmp_path / name, **{**ALL_OPTIONS, "accumulate": 2}, device="cuda", graph=graph))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@gpu
@pytest.mark.gpu
def test_graph_matches_python_with_all_options(tmp_path: Path) -> None:
    """A graph takes the steps that Python takes, the shorter last one of an epoch among them."""
    for graph in ("off", "on"):
        train(small_config(tmp_path / graph, **ALL_OPTIONS, dense_epochs=3, device="cuda", graph=graph))
    for a, b in zip(metric_rows(tmp_path / "off"), metric_rows(tmp_path / "on"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.1)
        assert b["lr"] == pytest.approx(a["lr"])
        assert "graph" not in b
