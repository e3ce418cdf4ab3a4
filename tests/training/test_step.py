"""The engine: learning rates over a run, mixed precision, and steps as CUDA graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cifar10_folders import write_binary
from helpers.training_jobs import metric_rows, small_config
from smartprune import METHODS, SmartpruneError
from smartprune.methods import capabilities
from smartprune.training.check import check, resolve
from smartprune.training.config import Config, configure
from smartprune.training.cuda_graph import place_rates
from smartprune.training.optimizer import lr_factor, set_learning_rates
from smartprune.training.result import Result
from smartprune.training.train import resume, train

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS = {"dense": 10, "search": 4, "finetune": 12}


def shares(config: Config, stage: str) -> list[float]:
    return [lr_factor(config, stage, step, STEPS.__getitem__, 2) for step in range(STEPS[stage])]


def test_one_cosine_over_search_and_fine_tuning() -> None:
    config = replace(configure({}), schedule_over="pruning")
    whole = [0.5 * (1 + math.cos(math.pi * step / 16)) for step in range(16)]
    assert shares(config, "search") + shares(config, "finetune") == pytest.approx(whole)
    assert shares(config, "dense")[5] == pytest.approx(0.5)


def test_every_stage_has_its_own_schedule_by_default() -> None:
    config = configure({})
    assert config.schedule_over == "stage"
    assert shares(config, "search") == [1.0] * 4
    assert shares(config, "finetune")[::6] == pytest.approx([1.0, 0.5])


def test_rates_on_the_device_change_in_place() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups: list[dict[str, Any]] = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.4}]
    optimizer = torch.optim.SGD(groups, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    set_learning_rates(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    place_rates(optimizer, torch.device("cpu"))
    placed = [group["lr"] for group in optimizer.param_groups]
    set_learning_rates(optimizer, 0.25)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, placed, strict=True))
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert [float(p.detach()[0]) for p in parameters] == pytest.approx([0.95, 0.9])


def test_bfloat16_run_on_a_cpu(tmp_path: Path) -> None:
    result = train(small_config(tmp_path / "a", amp="bf16", dense_epochs=1, search_epochs=1))
    assert result.verified
    assert all(math.isfinite(row["loss"]) for row in metric_rows(tmp_path / "a"))


def test_what_is_left_to_the_machine() -> None:
    config = resolve(configure({"amp": "auto", "device": "cpu"}))
    assert (config.device, config.amp) == ("cpu", "off")
    with pytest.raises(SmartpruneError, match="graph='on' needs a CUDA device; use --graph off or auto"):
        check(replace(configure({"device": "cpu", "graph": "on"}), out="x"))


def test_which_searches_can_be_recorded() -> None:
    reasons = {name: capabilities(method()).why_not_capturable for name, method in METHODS.items()}
    assert [name for name, reason in reasons.items() if reason is None] == ["smart", "magnitude", "gradual"]
    assert "decides on the host" in str(reasons["acdc"])
    assert "mask_type='stochastic'" in str(capabilities(METHODS["smart"](mask_type="stochastic")).why_not_capturable)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("pictures"))


def job(folder: Path, out: Path, **changes: Any) -> Config:
    given = {"task": "cifar10", "task_settings": {"folder": str(folder)}, "batch": 20, "device": "cuda", "amp": "off"}
    lengths = {"dense_epochs": 1, "search_epochs": 2, "finetune_epochs": 1, "lr": 0.02, "checkpoint_seconds": 1000.0}
    return configure({**given, **lengths, "out": str(out), **changes})


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["smart", "gradual"])
def test_a_graph_trains_as_python_does(method: str, folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": method, "sparsity": 0.5}
    for graph in ("off", "on"):
        train(job(folder, tmp_path / graph, graph=graph, **changes))
    for a, b in zip(metric_rows(tmp_path / "off"), metric_rows(tmp_path / "on"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=0.1)
        assert b["lr"] == pytest.approx(a["lr"])
        if a["stage"] == "search":
            assert b["undecided"] == pytest.approx(a["undecided"], rel=0.1, abs=50)
            assert sum(b["kept"]) == pytest.approx(sum(a["kept"]), rel=0.02)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stop_at", [15, 30, 65])
def test_a_recorded_run_resumes(stop_at: int, folder: Path, tmp_path: Path) -> None:
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
def test_every_method_on_a_gpu(method: str, folder: Path, tmp_path: Path) -> None:
    assert train(job(folder, tmp_path / "a", method=method, sparsity=0.5, amp="bf16")).verified
