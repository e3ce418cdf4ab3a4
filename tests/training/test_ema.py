"""The moving average of the weights, compared with a slow loop."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import smartprune as sp
from helpers.training_jobs import metric_rows, small_config
from smartprune.tasks import TASKS
from smartprune.training.ema import Ema, decay_at
from smartprune.training.train import train


def slow_average(history: list[dict[str, Tensor]], decay: float) -> dict[str, Tensor]:
    """Of the states before the first step and after every step, in double precision."""
    out = {name: value.double() for name, value in history[0].items()}
    for step, state in enumerate(history[1:], start=1):
        keep = min(decay, (1 + step) / (10 + step))
        out = {name: keep * out[name] + (1 - keep) * state[name].double() for name in out}
    return out


def test_decay_rises_to_its_value() -> None:
    assert decay_at(0.99, 1) == pytest.approx(2 / 11)
    assert decay_at(0.99, 10**6) == 0.99


def test_average_matches_a_slow_loop() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ema = Ema(model, 0.6)
    history = [copy.deepcopy(dict(model.state_dict()))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 30):
        model(torch.randn(8, 3) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
        history.append(copy.deepcopy(dict(model.state_dict())))
    expected = slow_average(history, 0.6)
    with ema.swapped_in():
        for name, value in model.state_dict().items():
            if value.is_floating_point():  # running_mean and running_var among them
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
            else:
                assert int(value) == 29
    for name, value in model.state_dict().items():
        assert torch.equal(value, history[-1][name])


def test_run_evaluates_and_saves_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, make, histories = Ema.update, Ema.__init__, []

    def begin(self: Ema, model: nn.Module, decay: float) -> None:
        make(self, model, decay)
        self.model = model  # type: ignore[attr-defined]
        histories.append([copy.deepcopy(dict(model.state_dict()))])

    def update(self: Ema, step: int) -> None:
        real(self, step)
        histories[-1].append(copy.deepcopy(dict(self.model.state_dict())))  # type: ignore[attr-defined]

    monkeypatch.setattr(Ema, "__init__", begin)
    monkeypatch.setattr(Ema, "update", update)
    result = train(small_config(tmp_path / "a", ema=0.8))
    dense, pruned = histories  # none in the search
    assert [len(history) for history in histories] == [15, 8]
    for file, history in (("dense", dense), ("model", pruned)):
        saved, expected = load_file(tmp_path / "a" / f"{file}.safetensors"), slow_average(history, 0.8)
        for name, value in saved.items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-6)
    start_of_search = histories[1][0]
    assert "conv1.weight" in start_of_search
    task = TASKS["digits"](width=4)
    model = task.model("resnet8")
    model.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        assert task.metric(model, task.data("test", torch.device("cpu"))) == result.pruned
        assert task.metric(model, task.data("validation", torch.device("cpu"))) == metric_rows(tmp_path / "a")[-1]["accuracy"]


def test_removed_blocks_are_zero_in_the_average() -> None:
    """Against the average of a copy that follows by ``apply_to``."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    ema: Ema | None = None
    other: nn.Module | None = None
    for step in range(1, 9):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        if pruner.phase != "frozen":
            continue
        if ema is None or other is None:
            ema, other = Ema(model, 0.5), copy.deepcopy(model)
        ema.update(step)
        copy_weights = dict(other.named_parameters())
        with torch.no_grad():
            for name, value in model.named_parameters():
                copy_weights[name].lerp_(value, 1 - decay_at(0.5, step))
        pruner.apply_to(other)
    assert ema is not None
    assert other is not None
    ema.copy_to_model()
    copied = sp.find_pruner(other).blocks.weights  # type: ignore[union-attr]
    for layer, weight, copy_weight in zip(pruner.plan.layers, pruner.blocks.weights, copied, strict=True):
        removed = layer.grid.expand(pruner.mask[layer.start : layer.stop].float()) == 0
        assert torch.count_nonzero(weight.detach()[removed]) == 0
        assert torch.equal(weight, copy_weight)
    assert sp.bake(model).met
