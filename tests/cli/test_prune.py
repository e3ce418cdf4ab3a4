"""``smartprune prune``: prunes a trained network without training it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import smartprune as sp
from helpers.latency_tables import table_of
from smartprune.cli import main
from smartprune.cli.prune import _Ticks
from smartprune.models import build
from smartprune.runtime import latency
from smartprune.runtime.latency_table import LatencyTable
from smartprune.tasks.digits import Digits


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "net.safetensors"
    save_file(Digits().model("resnet8").state_dict(), path)
    return path


def words(weights: Path, out: Path, *more: str) -> list[str]:
    options = ["--weights", str(weights), "--sparsity", "0.5", "--samples", "64", "--threads", "1", "--out", str(out)]
    return ["prune", "digits", *options, *more]


def test_a_task_is_pruned_with_its_training_data(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pruned"
    assert main(words(weights, out, "--json")) == 0
    printed = capsys.readouterr()
    receipt = sp.Receipt.load(out / "receipt.json")
    assert json.loads(printed.out) == receipt.to_json()
    assert {"sensitivities", "order", "refit", "tune"} <= set(printed.err.split())
    assert sorted(path.name for path in out.iterdir()) == ["model.packed.safetensors", "model.safetensors", "receipt.json"]
    assert receipt.blocks.kept == -(-receipt.blocks.total // 2)
    assert sp.verify(out / "model.safetensors", receipt=receipt).ok
    assert main(["verify", str(out / "model.safetensors"), "--receipt", str(out / "receipt.json")]) == 0
    assert main(["eval", str(out / "model.safetensors"), "--task", "digits"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["export", str(out), "--out", str(tmp_path / "net.onnx")])
    assert f"or the name of the network and --weights {out / 'model.safetensors'}" in capsys.readouterr().err


def test_inputs_may_be_an_array(weights: Path, tmp_path: Path) -> None:
    images = tmp_path / "images.npy"
    np.save(images, np.random.default_rng(0).normal(size=(40, 1, 8, 8)).astype(np.float32))
    budget = ["--macs", "0.5", "--floor", "0.05", "--skip", "stages.0.*", "--block", "8x4"]
    command = ["prune", f"{__name__}:make", "--calibration", str(images), "--out", str(tmp_path / "a"), *budget]
    assert main(command) == 0
    receipt = sp.Receipt.load(tmp_path / "a" / "receipt.json")
    assert receipt.met
    assert not any(row.name.startswith("stages.0.") for row in receipt.layers)


def make() -> torch.nn.Module:
    torch.manual_seed(1)
    return Digits().model("resnet8")


KILL = """
import os, sys
from smartprune.cli import main
from smartprune.cli.prune import _Ticks
def call(self, step, done, total):
    if step == "refit" and done == 3:
        os.kill(os.getpid(), 9)
_Ticks.__call__ = call
main(sys.argv[1:])
"""


def test_the_same_command_continues_after_sigkill_bit_for_bit(weights: Path, tmp_path: Path) -> None:
    command = words(weights, tmp_path / "a")
    assert subprocess.run([sys.executable, "-c", KILL, *command], check=False, capture_output=True).returncode == -9
    assert list((tmp_path / "a" / "steps").glob("refit-*"))
    assert main(command) == 0
    assert main(words(weights, tmp_path / "b")) == 0
    for name in ("model.safetensors", "model.packed.safetensors", "receipt.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_dense_run_is_pruned_with_its_task(weights: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    settings = {"task": "digits", "method": "smart", "out": str(run)}
    (run / "config.json").write_text(json.dumps(settings))
    (run / "dense.safetensors").write_bytes(weights.read_bytes())
    command = ["prune", str(run), "--sparsity", "0.5", "--samples", "64", "--out", str(tmp_path / "a")]
    assert main(command) == 0
    assert main(words(weights, tmp_path / "b")) == 0
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


WRONG: dict[str, tuple[list[str], str]] = {
    "no weights": (["digits", "--sparsity", "0.5"], "digits has random weights"),
    "no budget": (["digits", "--weights", "W"], "no budget given"),
    "no data": (["resnet18", "--weights", "R", "--sparsity", "0.5"], "add --task NAME, or --calibration"),
    "two sources": (["digits", "--weights", "W", "--task", "digits", "--calibration", "W"], "both given"),
    "samples": (["digits", "--weights", "W", "--samples", "1"], "--samples 1 must be at least 2"),
    "unknown": (["nothing", "--weights", "W", "--sparsity", "0.5"], "unknown model 'nothing'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.safetensors"
    save_file(build("resnet18").state_dict(), other) if name == "no data" else None
    given, message = WRONG[name]
    names: dict[str, Any] = {"W": str(weights), "R": str(other)}
    with pytest.raises(SystemExit) as caught:
        main(["prune", *[names.get(word, word) for word in given], "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_command_keeps_the_times_that_it_measured(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two measurements differ, so the second command must read those of the first."""
    seeds = itertools.count()
    monkeypatch.setattr(latency, "measure_latency", lambda model, layers, example, threads: table_of(layers, next(seeds), example))

    class Interrupt(Exception):  # noqa: N818
        pass

    def interrupt(self: _Ticks, step: str, done: int, total: int) -> None:
        if step == "refit":
            raise Interrupt

    out = tmp_path / "pruned"
    command = words(weights, out)
    position = command.index("--sparsity")
    command[position : position + 2] = ["--budget", "latency=0.4"]
    with monkeypatch.context() as patch:
        patch.setattr(_Ticks, "__call__", interrupt)
        with pytest.raises(Interrupt):
            main(command)
    assert main(command) == 0
    assert next(seeds) == 1  # measured once
    receipt = sp.Receipt.load(out / "receipt.json")
    assert receipt.requested is not None
    assert receipt.requested.table is not None
    assert receipt.requested.table["sha256"] == LatencyTable.load(out / "latency.json").digest


def test_a_folder_with_other_files_is_refused(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(words(weights, tmp_path / "out"))
    assert "is not empty" in capsys.readouterr().err
