"""What the pruner does behind the user's back, counted."""

import pytest
import torch
from torch import nn

import smartprune as sp
import zoo
from smartprune.methods import smart


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every solve of the soft top-k."""
    calls: list[int] = []
    real = smart.soft_topk

    def counted(scores: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        calls.append(scores.numel())
        return real(scores, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(smart, "soft_topk", counted)
    return calls


def test_one_solve_per_forward_whatever_the_number_of_layers(solves: list[int]) -> None:
    model, x = zoo.resnet18()
    pruner = sp.attach(model, sp.Smart(), block=(16, 8), sparsity=0.95, steps=10)
    assert len(pruner.plan.layers) == 19
    model(x)
    assert solves == [87168]
    model.eval()
    with torch.no_grad():
        model(x)
    assert len(solves) == 2


def test_one_solve_per_step_where_only_submodules_are_called(solves: list[int]) -> None:
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


def test_a_change_of_autocast_multiplies_again_but_does_not_solve_again(solves: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=10)
    model(x)
    first = pruner.masked(0)
    monkeypatch.setattr(sp.pruner, "_autocast", lambda: torch.bfloat16)
    assert pruner.masked(0) is not first
    assert len(solves) == 1


def test_a_frozen_model_solves_nothing(solves: list[int]) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1)
    pruner.freeze(force=True)
    solves.clear()
    nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
    assert solves == []
    assert model[3].weight.data_ptr() == pruner.blocks.weights[0].data_ptr()  # the weight itself: nothing is copied
