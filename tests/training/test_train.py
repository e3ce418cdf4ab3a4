"""Whole runs: their files, metrics, methods and budgets."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smartprune as sp
from helpers.training_jobs import EXACT_FILES, StopAfter, assert_same_run, metric_rows, small_config
from smartprune import METHODS, SmartpruneError, cli
from smartprune.artifacts.receipt import Receipt
from smartprune.artifacts.verify import verify
from smartprune.hardware.npu import read_npu
from smartprune.tasks.digits import Digits
from smartprune.training.config import make_task
from smartprune.training.result import Result
from smartprune.training.train import resume, train, train_dense


def test_run_folder_has_all_files(finished_run: Path) -> None:
    names = {path.name for path in finished_run.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "checkpoint.pt", "receipt.json", "result.json",
        "dense.safetensors", "model.safetensors", "model.packed.safetensors", "scores.safetensors", "report.html",
    }  # fmt: skip
    result = Result.load(finished_run)
    assert result.verified
    assert 0 < result.dense <= 1
    assert 0 < result.pruned <= 1
    assert result.seconds == pytest.approx(sum(result.stage_seconds.values()), abs=0.01)
    assert {"torch", "python", "device", "threads", "processes", "smartprune", "system"} == set(result.versions)
    receipt = Receipt.load(finished_run / "receipt.json")
    assert receipt.met
    assert receipt.blocks.kept == math.ceil(receipt.blocks.total / 2)
    assert verify(finished_run).ok


def test_metrics_have_a_row_for_every_epoch(finished_run: Path) -> None:
    rows = metric_rows(finished_run)
    assert [(row["stage"], row["epoch"]) for row in rows] == [
        ("dense", 1), ("dense", 2), ("search", 1), ("search", 2), ("finetune", 1)
    ]  # fmt: skip
    assert all(0 < row["accuracy"] <= 1 for row in rows)
    for row in rows[2:4]:
        assert {"tau", "undecided", "changed", "gap", "kept", "collapsed"} <= set(row)


def test_the_metric_of_the_search_is_that_of_the_masked_model(tmp_path: Path) -> None:
    """After the search, before fine-tuning, compared with a model that is stopped there and evaluated by hand."""
    with pytest.raises(SmartpruneError, match="stopped in search"):
        train(small_config(tmp_path / "run"), stop=StopAfter(28))  # 7 steps per epoch
    last = metric_rows(tmp_path / "run")[-1]
    assert (last["stage"], last["epoch"], last["undecided"]) == ("search", 2, 0)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    task = Digits(width=4)
    model = task.model("resnet8")
    model.load_state_dict({name: state[name] for name in model.state_dict()})  # the mask is hard, so removed blocks are zero
    model.eval()
    with torch.no_grad():
        assert last["accuracy"] == task.metric(model, task.data("validation", torch.device("cpu")))


def test_the_metric_of_the_search_does_not_change_the_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smartprune.training.train._validate", lambda run, data: None)
    train(small_config(tmp_path / "blind"))
    for name in EXACT_FILES:
        assert (tmp_path / "blind" / name).read_bytes() == (finished_run / name).read_bytes()


def test_the_dense_model_alone_is_that_of_the_whole_run(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "dense"
    with pytest.raises(SmartpruneError, match="stopped in dense"):
        train_dense(out, small_config(out), lambda tick: None, StopAfter(5))
    for _ in range(2):  # it continues, and changes nothing once it is done
        assert train_dense(out, None, lambda tick: None, lambda: False) == out / "dense.safetensors"
        assert (out / "dense.safetensors").read_bytes() == (finished_run / "dense.safetensors").read_bytes()
    assert {row["stage"] for row in metric_rows(out)} == {"dense"}
    resume(out)
    assert_same_run(out, finished_run)


def test_baked_model_has_the_stated_accuracy(finished_run: Path) -> None:
    task = Digits(width=4)
    model = task.model("resnet8")
    model.load_state_dict(load_file(finished_run / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        accuracy = task.metric(model, task.data("test", torch.device("cpu")))
    assert accuracy == Result.load(finished_run).pruned


def test_another_seed_gives_another_model(finished_run: Path, tmp_path: Path) -> None:
    train(small_config(tmp_path / "b", seed=1))
    assert (tmp_path / "b" / "model.safetensors").read_bytes() != (finished_run / "model.safetensors").read_bytes()


def test_given_dense_model_leads_to_the_same_result(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "from-dense"
    result = train(small_config(out, dense=str(finished_run / "dense.safetensors")))
    for name in ("dense.safetensors", "model.safetensors", "receipt.json"):
        assert (out / name).read_bytes() == (finished_run / name).read_bytes()
    assert result.dense == Result.load(finished_run).dense
    assert [row["stage"] for row in metric_rows(out)] == ["search", "search", "finetune"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_meets_the_budget(method: str, finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / method
    train(small_config(out, method=method, search_epochs=3, dense=str(finished_run / "dense.safetensors")))
    receipt = Receipt.load(out / "receipt.json")
    assert receipt.method == method
    assert receipt.met


ABLATION = [
    {"mask_type": "stochastic"},
    {"mask_type": "binary"},
    {"mask_type": "binary_soft"},
    {"schedule": "fixed", "start": 0.01, "unit": "absolute"},
    {"schedule": "linear"},
    {"schedule": "inverse_exponential"},
    {"schedule": "paper_exponential", "start": 0.5, "end": 1e-5, "unit": "absolute"},
    {"start": 10.0, "end": 1e-7, "unit": "absolute"},
    {"init": "ones"},
    {"init": "l1"},
    {"train_weights": False},
    {"ramp": "cubic", "clip": 1.0},
]


@pytest.mark.parametrize("settings", ABLATION, ids=str)
def test_every_ablation_setting_trains(settings: dict[str, object], finished_run: Path, tmp_path: Path) -> None:
    """Every switch of the paper's Table 5, from the dense model to the verified file."""
    result = train(small_config(tmp_path / "run", settings=settings, dense=str(finished_run / "dense.safetensors")))
    assert result.verified
    assert Receipt.load(tmp_path / "run" / "receipt.json").met


def test_macs_budget_is_met(finished_run: Path, tmp_path: Path) -> None:
    train(small_config(tmp_path / "macs", sparsity=None, macs=0.5, dense=str(finished_run / "dense.safetensors")))
    receipt = Receipt.load(tmp_path / "macs" / "receipt.json")
    assert receipt.macs is not None
    assert receipt.macs.removed >= receipt.macs.total / 2
    assert receipt.requested is not None
    assert receipt.requested.kind == "macs"


def test_cycles_budget_is_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    config = small_config(out, sparsity=None, cycles=0.6, npu="edge")
    assert config.budget_share == ("cycles", 0.6)
    train(config)
    task = make_task(config.task, config.task_settings)
    model, npu = task.model(config.model), read_npu("edge")
    model.load_state_dict(load_file(out / "model.safetensors"))
    pruned = npu.estimate(model, task.example(), block=config.block)
    names = {layer.name for layer in sp.Receipt.load(out / "receipt.json").layers}
    rows = [row for row in pruned.layers if row.name in names]
    assert len(rows) == len(names)
    assert 0 < sum(row.pruned.latency for row in rows) <= 0.4 * sum(row.dense.latency for row in rows)
    assert cli.main(["compare", str(out)]) == 0
    assert "cycles 0.6" in capsys.readouterr().out
    with pytest.raises(SmartpruneError, match=r"sparsity=0.5 and cycles=0.6: set exactly one of sparsity, macs, cycles, budget"):
        small_config(out, cycles=0.6)
    with pytest.raises(SmartpruneError, match="npu 'toaster' is not known; there are: "):
        small_config(out, sparsity=None, cycles=0.6, npu="toaster")


def test_adamw_floor_and_skip(finished_run: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "search_lr": 1e-3, "finetune_lr": 1e-3, "floor": 0.25}
    train(small_config(tmp_path / "a", skip=["stages.0.*"], dense=str(finished_run / "dense.safetensors"), **changes))
    receipt = Receipt.load(tmp_path / "a" / "receipt.json")
    assert all(row.blocks.kept >= row.blocks.total / 4 for row in receipt.layers)
    assert not any(row.name.startswith("stages.0") for row in receipt.layers)


def test_network_that_does_not_fit_the_task_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfit.py").write_text(
        "from smartprune.models import build\ndef net():\n    return build('resnet8', num_classes=3, in_channels=1)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SmartpruneError, match=r"model='unfit:net': its first step on digits failed \(IndexError: Target \d"):
        train(small_config(tmp_path / "run", model="unfit:net"))
