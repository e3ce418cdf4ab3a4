"""Checks before a run: errors come before training, and the machine is resolved once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.training_jobs import small_config
from smartprune import SmartpruneError
from smartprune.training.check import check, resolve
from smartprune.training.config import configure
from smartprune.training.train import train


def test_budgets_that_cannot_be_met_are_errors_before_training(tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=r"floor=0\.9 needs"):
        train(small_config(tmp_path / "a", floor=0.9))
    with pytest.raises(SmartpruneError, match="matches no layer"):
        train(small_config(tmp_path / "a", skip=["nothing.*"]))
    assert not (tmp_path / "a").exists()


def test_dense_file_that_does_not_fit_is_an_error(finished_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with pytest.raises(SmartpruneError, match=r"cannot be read as a \.safetensors file"):
        check(small_config(tmp_path / "a", dense=str(file)))
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(SmartpruneError, match=r"cannot be read as a \.safetensors file"):
        check(small_config(tmp_path / "a", dense=str(file)))
    tensors = load_file(finished_run / "dense.safetensors")
    with pytest.raises(SmartpruneError, match=r"conv1.weight has shape \(4, 1, 3, 3\) in the file and \(8, 1, 3, 3\) in the model"):
        check(small_config(tmp_path / "a", dense=str(finished_run / "dense.safetensors"), task_settings={"width": 8}))
    save_file({name: value for name, value in tensors.items() if not name.startswith("fc")}, file)
    with pytest.raises(SmartpruneError, match=r"lacks fc.bias, fc.weight; give the model it was saved from"):
        check(small_config(tmp_path / "a", dense=str(file)))
    save_file({**tensors, "fc.bias": tensors["fc.bias"] * math.nan}, file)
    with pytest.raises(SmartpruneError, match=r"fc\.bias holds NaN or infinity"):
        check(small_config(tmp_path / "a", dense=str(file)))


def test_threads_are_resolved_once(tmp_path: Path) -> None:
    """A resumed run must not depend on how many cores are free by then."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        config = resolve(small_config(tmp_path / "run", threads=0))
    finally:
        torch.set_num_threads(before)
    assert config.threads == 2
    assert resolve(config).threads == 2


def test_auto_settings_are_resolved() -> None:
    config = resolve(configure({"amp": "auto", "device": "cpu"}))
    assert (config.device, config.amp) == ("cpu", "off")
    with pytest.raises(SmartpruneError, match="graph='on' needs a CUDA device; use --graph off or auto"):
        check(replace(configure({"device": "cpu", "graph": "on"}), out="x"))


def test_distillation_needs_a_dense_model_and_a_distance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SmartpruneError, match=r"distill=0\.5 needs a trained dense model; give --dense FILE"):
        check(small_config(tmp_path / "a", distill=0.5, dense_epochs=0))
    monkeypatch.delattr("smartprune.tasks.digits.Digits.distance")
    with pytest.raises(SmartpruneError, match=r"distill=0\.5: the task digits has no distance\(\) .*; use --distill 0"):
        check(small_config(tmp_path / "a", distill=0.5))


def test_network_may_be_an_object_with_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "objects.py").write_text(
        "from smartprune.models import build\nNET = build('resnet8', num_classes=10, in_channels=1)\n"
        "from torch import nn\nNONE = nn.Flatten()\n"
    )
    monkeypatch.chdir(tmp_path)
    train(small_config(tmp_path / "run", model="objects:NET"))
    with pytest.raises(SmartpruneError, match="has no parameters"):
        check(small_config(tmp_path / "other", model="objects:NONE"))
