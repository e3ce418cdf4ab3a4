"""``smartprune plan``, ``report`` and ``verify``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.training_jobs import run_cli

pytestmark = pytest.mark.usefixtures("in_work_folder")


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "resnet18", "--block", "16x8", "--sparsity", "0.95", "--input", "3x32x32") == 0
    assert "87,168 in 19 layers" in capsys.readouterr().out
    assert run_cli("plan", "digits", "--sparsity", "0.9", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["block"], data["feasible"]) == ("16x8x1x1", True)
    assert data["macs"] is not None
    assert data["expected"]["model_macs"]["kept"] < data["expected"]["model_macs"]["total"]
    assert data["expected"]["npu"]["rows"] == 16
    assert run_cli("plan", "digits", "--sparsity", "0.9", "--npu", "small", "--json") == 0
    assert json.loads(capsys.readouterr().out)["expected"]["npu"]["rows"] == 8
    assert run_cli("plan", "digits", "--measure") == 2
    assert "--measure times the model at a budget: add a budget" in capsys.readouterr().err


def test_plan_of_an_external_model(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "ownnet.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))\n"
        "def wrong():\n    return 3\n"
    )
    assert run_cli("plan", "ownnet:build", "--params", "0.5") == 0
    assert "8 in 1 layer" in capsys.readouterr().out
    assert run_cli("plan", "ownnet:wrong") == 2
    assert "ownnet:wrong() returned a int; it must return a torch.nn.Module" in capsys.readouterr().err


def test_infeasible_plan_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "digits", "--sparsity", "0.95", "--floor", "0.5") == 1
    assert "problem  floor=0.5 needs" in capsys.readouterr().out


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("report", "runs/a") == 0
    assert "blocks of 4x2" in capsys.readouterr().out
    assert run_cli("report", "runs/a/model.safetensors", "--block", "4x2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    receipt = json.loads(Path("runs/a/receipt.json").read_text())
    assert data["blocks"]["removed"] == receipt["achieved"]["blocks"]["removed"]
    assert run_cli("report", "runs/a", "--map", "stages.0.0.conv1") == 0
    assert "stages.0.0.conv1:" in capsys.readouterr().out
    for flags in (["--json"], ["--npu", "edge"]):
        assert run_cli("report", "runs/a", "--map", "stages.0.0.conv1", *flags) == 2
        assert f"remove {flags[0]}" in capsys.readouterr().err


def test_verify(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("verify", "runs/a") == 0
    assert "ok: matches the receipt" in capsys.readouterr().out
    assert run_cli("verify", "runs/a/model.safetensors", "--receipt", "runs/a/receipt.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert run_cli("verify", "runs/a", "--block", "8x4") == 1
    capsys.readouterr()
    tensors = load_file(work / "runs/a/model.safetensors")
    tensors["stages.2.0.conv2.weight"] += 1e-30
    save_file(tensors, work / "changed.safetensors")
    assert run_cli("verify", "changed.safetensors", "--receipt", "runs/a/receipt.json") == 1
    assert "NOT ok" in capsys.readouterr().out
