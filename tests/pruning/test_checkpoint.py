"""The state dict of a pruner: the same entries at every step, and states of older versions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.methods import METHODS

STEPS = 16


def setup(method: str) -> tuple[nn.Module, sp.Pruner, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 4))
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.7, include="*", steps=STEPS)
    return model, pruner, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model: nn.Module, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, steps: int) -> None:
    x = torch.linspace(-1, 1, 16 * 12).sin().reshape(16, 12)
    for _ in range(steps):
        (model(x).square().mean() + pruner.penalty()).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()


def kinds(value: Any) -> Any:
    """The entries of a state, each as its type, and a tensor also as its shape and dtype."""
    if isinstance(value, dict):
        return {name: kinds(entry) for name, entry in value.items()}
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


@pytest.mark.parametrize("method", METHODS)
def test_state_has_the_same_entries_at_every_step(method: str) -> None:
    """torch.distributed.checkpoint loads into the state of a new pruner, entry by entry."""
    parts = setup(method)
    first = kinds(parts[1].state_dict())
    for _ in range(STEPS + 1):
        train(*parts, 1)
        assert kinds(parts[1].state_dict()) == first
    sp.bake(parts[0])
    assert kinds(parts[1].state_dict()) == first


def older(state: dict[str, Any]) -> dict[str, Any]:
    """The state as version 1 of the format stored it."""
    out = {**state, "format": 1}
    out["mask"] = None if state["phase"] == "search" else state["mask"]
    if state["measured"].isnan().any():
        return {**out, "side": None, "measured": None}
    return {**out, "measured": state["measured"].float()}


@pytest.mark.parametrize("steps", [0, 3, STEPS])
def test_states_of_format_1_load(steps: int) -> None:
    saved, loaded = setup("smart"), setup("smart")
    train(*saved, steps)
    loaded[1].load_state_dict(older(saved[1].state_dict()))
    assert loaded[1].phase == saved[1].phase
    assert torch.equal(loaded[1].mask, saved[1].mask)
    assert str(loaded[1].telemetry()) == str(saved[1].telemetry())  # as text, where NaN equals NaN


def test_loading_a_state_without_measurements_removes_those_of_the_pruner() -> None:
    new, trained = setup("smart"), setup("smart")
    train(*trained, 3)
    trained[1].load_state_dict(new[1].state_dict())
    assert trained[1].telemetry()["undecided"] == 0


@pytest.mark.parametrize("wrong", [{"phase": "done"}, {"phase": "frozen", "mask": None}, {"format": 3}])
def test_states_with_a_wrong_phase_or_format_are_refused(wrong: dict[str, Any]) -> None:
    pruner = setup("smart")[1]
    with pytest.raises(sp.SmartpruneError, match=r"damaged|not the state of a pruner"):
        pruner.load_state_dict(pruner.state_dict() | wrong)
