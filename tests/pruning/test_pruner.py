"""What the pruner does behind the user's back, counted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.methods import smart
from smartprune.methods.method import Method


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
    first = pruner.live.masked(0)
    monkeypatch.setattr("smartprune.pruning.weights._autocast_dtype", lambda: torch.bfloat16)
    assert pruner.live.masked(0) is not first
    assert len(solves) == 1


def test_a_frozen_model_solves_nothing(solves: list[int]) -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1)
    pruner.freeze(force=True)
    solves.clear()
    nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
    assert solves == []
    assert model[3].weight.data_ptr() == pruner.blocks.weights[0].data_ptr()  # the weight itself: nothing is copied


def searched(look: Callable[[nn.Module, sp.Pruner], object], told: Callable[[sp.Pruner], object]) -> list[torch.Tensor]:
    """The state at the end of a search in which somebody looks before and after every step of the pruner."""
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(20):
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        optimizer.step()
        with torch.no_grad():
            look(model.eval(), pruner)
        model.train()
        pruner.step()
        told(pruner)
        optimizer.zero_grad()
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_who_looks_at_a_search_does_not_change_it() -> None:
    """A mask that was asked for after the optimizer's step moved the place where the next solve starts, by some bits."""
    x = zoo.plain_cnn()[1]
    plain = searched(lambda model, pruner: None, lambda pruner: None)
    looked = searched(lambda model, pruner: (pruner.mask, model(x)), lambda pruner: pruner.telemetry())
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))


def test_telemetry_of_steps_after_an_evaluation() -> None:
    """What an evaluation drops was not measured: the figures stood still."""
    x, masks = zoo.plain_cnn()[1], []

    def look(model: nn.Module, pruner: sp.Pruner) -> None:
        model(x)
        masks.append(pruner.mask)

    def told(pruner: sp.Pruner) -> None:
        mask = pruner.mask if pruner.phase == "frozen" else masks[-1]  # that of the step; hard once it was the last
        found = pruner.telemetry()
        assert found["undecided"] == sum(0.01 < value < 0.99 for value in mask.tolist())
        assert found["kept"] == [int((mask[layer.start : layer.stop] > 0.5).sum()) for layer in pruner.plan.layers]

    searched(look, told)
    assert len(masks) == 20
    assert not torch.equal(masks[0], masks[-1])


@pytest.mark.parametrize("method", [sp.Smart(), sp.Gradual(), sp.Pdp(), sp.Pas(), sp.Awg(stages=2, cap="relax"), sp.Acdc(cycles=2)])
@pytest.mark.parametrize("kind", ["blocks", "macs", "cycles"])
def test_another_default_device(method: Method, kind: str, tmp_path: Path) -> None:
    """As with torch.set_default_device("cuda") and a model on the CPU: nothing of ours may land there."""
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
