"""Masked weights are made once per forward pass, and reading them does not change a search."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.methods import smart


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per solve of the soft top-k: the number of scores."""
    calls: list[int] = []
    real = smart.soft_topk

    def counted(scores: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        calls.append(scores.numel())
        return real(scores, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(smart, "soft_topk", counted)
    return calls


def test_one_solve_per_forward_pass(solves: list[int]) -> None:
    model, x = zoo.resnet18()
    pruner = sp.attach(model, sp.Smart(), block=(16, 8), sparsity=0.95, steps=10)
    assert len(pruner.plan.layers) == 19
    model(x)
    assert solves == [87168]
    model.eval()
    with torch.no_grad():
        model(x)
    assert len(solves) == 2


def test_one_solve_per_step_if_only_submodules_are_called(solves: list[int]) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for step in range(3):
        out = x
        for layer in model:
            out = layer(out)
        out.sum().backward()
        optimizer.step()
        pruner.step()
        assert len(solves) == step + 1


def test_another_autocast_dtype_multiplies_but_does_not_solve(solves: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=10)
    model(x)
    first = pruner.live.masked(0)
    monkeypatch.setattr("smartprune.pruning.weights._autocast_dtype", lambda: torch.bfloat16)
    assert pruner.live.masked(0) is not first
    assert len(solves) == 1


def test_frozen_model_does_not_solve(solves: list[int]) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1)
    pruner.freeze(force=True)
    solves.clear()
    nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
    assert solves == []
    assert model[3].weight.data_ptr() == pruner.blocks.weights[0].data_ptr()  # the weight itself: nothing is copied


def run_search(before: Callable[[nn.Module, sp.Pruner], object], after: Callable[[sp.Pruner], object]) -> list[torch.Tensor]:
    """The final state of a search with a callback before and one after every step of the pruner."""
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        optimizer.step()
        with torch.no_grad():
            before(model.eval(), pruner)
        model.train()
        pruner.step()
        after(pruner)
        optimizer.zero_grad()
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_reading_the_mask_between_steps_does_not_change_the_result() -> None:
    """Reading a mask after the step of the optimizer must not change where the next solve starts."""
    x = zoo.plain_cnn()[1]
    expected = run_search(lambda model, pruner: None, lambda pruner: None)
    observed = run_search(lambda model, pruner: (pruner.mask, model(x)), lambda pruner: pruner.telemetry())
    assert all(torch.equal(a, b) for a, b in zip(expected, observed, strict=True))


def test_telemetry_is_measured_after_an_evaluation_in_mid_step() -> None:
    """An evaluation drops the masked weights, but the mask of the step is still measured."""
    x, masks = zoo.plain_cnn()[1], []

    def before(model: nn.Module, pruner: sp.Pruner) -> None:
        model(x)
        masks.append(pruner.mask)

    def after(pruner: sp.Pruner) -> None:
        mask = pruner.mask if pruner.phase == "frozen" else masks[-1]  # the mask of the step; hard after the last one
        telemetry = pruner.telemetry()
        assert telemetry["undecided"] == sum(0.01 < value < 0.99 for value in mask.tolist())
        assert telemetry["kept"] == {layer.name: int((mask[layer.start : layer.stop] > 0.5).sum()) for layer in pruner.plan.layers}

    run_search(before, after)
    assert len(masks) == 20
    assert not torch.equal(masks[0], masks[-1])
