"""The example of every trainer runs, and prunes exactly. The counts of zero blocks are made here."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.torchvision_operators import declare_operators

declare_operators()
ROOT = Path(__file__).parents[2]
EXAMPLES = {"with_accelerate": "accelerate", "with_lightning": "lightning", "with_transformers": "transformers"}
EXAMPLES |= {"with_ultralytics": "ultralytics", "with_ray": "ray"}  # test_ray.py runs the last one


def example(name: str) -> Any:
    if importlib.util.find_spec(EXAMPLES[name]) is None:
        pytest.skip(f"{EXAMPLES[name]} is not installed; run make hosts")
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def kept(model: nn.Module, receipt: sp.Receipt, rows: int, columns: int) -> int:
    """Blocks of the linear layers and convolutions in the receipt that are not zero, counted block by block."""
    count = 0
    for row in receipt.layers:
        weight = model.get_parameter(row.weight).detach()
        weight = weight.reshape(*weight.shape[:2], -1)
        for top in range(0, weight.shape[0], rows):
            for left in range(0, weight.shape[1], columns):
                count += int((weight[top : top + rows, left : left + columns] != 0).any(0).any(0).sum())
    return count


def test_every_host_has_an_example() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("with_*.py")} == set(EXAMPLES)


def test_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main = example("with_lightning")
    monkeypatch.chdir(tmp_path)
    module, receipt = main()
    assert kept(module, receipt, 8, 4) == receipt.blocks.kept == receipt.blocks.total // 4


def test_transformers(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    main = example("with_transformers")
    _, receipt = main(tmp_path)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert kept(loaded, receipt, 8, 8) == receipt.blocks.kept == -(-receipt.blocks.total * 3 // 10)


def test_ultralytics(tmp_path: Path) -> None:
    os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}
    os.environ.setdefault("YOLO_CONFIG_DIR", str(Path(tempfile.gettempdir()) / "smartprune-hosts"))
    if importlib.util.find_spec("polars") is None:
        pytest.skip("polars is not installed; run make hosts")
    main = example("with_ultralytics")
    from helpers.hosts import yolo_data

    yolo_data.provide_suppression()
    data = yolo_data.write(tmp_path / "data", outlines=False)
    short = {"imgsz": yolo_data.SIZE, "batch": 4, "nbs": 4, "plots": False, "amp": False, "device": "cpu", "optimizer": "SGD"}
    model, receipt = main(str(data), "yolov8n.yaml", tmp_path, epochs=4, **short)
    assert kept(model.model, receipt, 16, 8) == receipt.blocks.kept == -(-receipt.blocks.total // 2)


def test_accelerate_with_two_processes_resumes_bit_exactly_in_mid_search(tmp_path: Path) -> None:
    example("with_accelerate")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(sp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        script = str(ROOT / "examples" / "with_accelerate.py")
        done = subprocess.run(
            [*command, script, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    whole = re.findall(r"kept (\d+) of (\d+) blocks, weights ([0-9a-f]{64})", run("--out", "whole"))
    assert len(whole) == 2, "both processes print"
    assert whole[0] == whole[1]
    assert run("--out", "part", "--epochs", "1").count("step 6 of 12 of the search") == 2
    assert re.findall(r"kept (\d+) of (\d+) blocks, weights ([0-9a-f]{64})", run("--out", "part", "--resume")) == whole
    receipt, weights = sp.Receipt.load(tmp_path / "whole" / "receipt.json"), torch.load(tmp_path / "whole" / "model.pt")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    model.load_state_dict(weights)
    assert kept(model, receipt, 8, 4) == receipt.blocks.kept == receipt.blocks.total // 2
