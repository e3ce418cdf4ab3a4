"""The public interface of the pruner for integrations and CUDA graphs, and models on other devices than the default one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.methods.method import Method


@pytest.mark.parametrize("method", [sp.Smart(), sp.Gradual(), sp.Pdp(), sp.Pas(), sp.Awg(stages=2, cap="relax"), sp.Acdc(cycles=2)])
@pytest.mark.parametrize("kind", ["blocks", "macs", "cycles"])
def test_another_default_device_is_ignored(method: Method, kind: str, tmp_path: Path) -> None:
    """As with torch.set_default_device("cuda") and a model on the CPU: no tensor may be created on that device."""
    model, x = zoo.plain_cnn()
    budgets = {
        "blocks": {"sparsity": 0.5, "floor": 0.1},
        "macs": {"budget": sp.macs(0.4, example=x)},
        "cycles": {"budget": sp.cycles(0.3, example=x, npu=sp.NPU(rows=4, columns=4))},
    }
    target = torch.tensor([1, 2, 3, 4])
    with torch.device("meta"):
        pruner = sp.attach(model, method, block=(4, 4), steps=8, **budgets[kind])  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(8):
            (nn.functional.cross_entropy(model(x), target) + pruner.penalty()).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()
            pruner.telemetry()
        receipt = sp.bake(model)
        assert sp.verify(model, receipt=receipt).ok
        sp.pack(model, tmp_path / "packed", receipt=receipt)
        assert sp.verify(tmp_path / "packed").mask_hash == receipt.mask_hash
        assert torch.equal(sp.unpack(tmp_path / "packed")["3.weight"], model[3].weight)
        assert str(sp.report(tmp_path / "packed"))


def attach_smart(steps: int = 10) -> tuple[nn.Module, torch.Tensor, sp.Pruner]:
    model, x = zoo.plain_cnn()
    return model, x, sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=steps)


def train_step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
    optimizer.step()


def test_reschedule_equals_attaching_with_that_length() -> None:
    states = []
    for steps in (10, 6):
        torch.manual_seed(0)
        model, x, pruner = attach_smart(steps)
        pruner.reschedule(6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(6):
            train_step(model, x, optimizer)
            pruner.step()
            optimizer.zero_grad()
        assert pruner.phase == "frozen"
        states.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


def test_reschedule_after_the_first_step_raises() -> None:
    model, x, pruner = attach_smart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_step(model, x, optimizer)
    pruner.step()
    with pytest.raises(sp.SmartpruneError, match="the search is at step 1; change its length before it begins"):
        pruner.reschedule(20)
    assert pruner.steps == 10


def test_a_state_of_another_length_needs_adopt_steps() -> None:
    state = attach_smart(20)[2].state_dict()
    pruner = attach_smart(10)[2]
    with pytest.raises(sp.SmartpruneError, match="steps=20, this one 10"):
        pruner.load_state_dict(state)
    assert pruner.steps == 10
    pruner.load_state_dict(state, adopt_steps=True)
    assert pruner.steps == 20


def test_a_restored_forward_pass_is_what_the_step_measures() -> None:
    """As with a CUDA graph, whose replays write into the memory of the recorded forward pass."""
    model, x, pruner = attach_smart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_step(model, x, optimizer)
    masked = pruner.take_forward()
    assert masked is not None
    assert pruner.take_forward() is None
    masked.mask.detach()[:] = 1.0
    pruner.restore_forward(masked)
    pruner.step()
    assert sum(pruner.telemetry()["kept"].values()) == pruner.plan.n
    pruner.freeze(force=True)
    model(x)
    assert pruner.take_forward() is None  # only the mask of a search is measured


def test_steps_after_replays_of_a_recorded_forward_pass_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own CUDA graph runs forward passes and optimizers that no hook sees."""
    model, x, pruner = attach_smart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_step(model, x, optimizer)
    pruner.step()
    with pytest.raises(sp.SmartpruneError, match="called twice after one optimizer step"):
        pruner.step()
    with monkeypatch.context() as recording:
        recording.setattr(torch.cuda, "is_initialized", lambda: True)
        recording.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        train_step(model, x, optimizer)
    for _ in range(3):
        pruner.step()


@pytest.mark.parametrize("name", sorted(sp.METHODS))
def test_a_method_may_be_given_by_name(name: str) -> None:
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, name, block=(4, 4), sparsity=0.5, steps=1000)
    assert pruner.method == sp.METHODS[name]()
