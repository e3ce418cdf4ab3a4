"""Promise 1: the number of blocks kept is ceil((1 - sparsity) * N) in exact arithmetic; a budget is never exceeded."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case


def blocks_in(weight: torch.Tensor, layer: object) -> int:
    """Counts blocks with anything but zeros in them, by slow loops over the stored axes."""
    axes = layer.grid.axes  # type: ignore[attr-defined]
    seen = set()
    for index in weight.nonzero().tolist():
        place = []
        for i, axis in zip(index, axes, strict=True):
            part, rest = divmod(i, axis.length)
            place.append((part, rest // axis.step))
        seen.add(tuple(place))
    return len(seen)


def test_exact_count(case: Case) -> None:
    pruner = case.attach()
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 5)
    n = pruner.plan.n
    keep = math.ceil((1 - Fraction("0.8")) * n)
    assert int(pruner.mask.sum()) == keep
    receipt = sp.bake(case.model)
    named = dict(case.model.named_parameters())
    found = sum(blocks_in(named[layer.weight], layer) for layer in pruner.plan.layers)
    assert found == keep
    assert receipt.to_json()["mask_hash"].startswith("sha256:")


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.93, 0.95, 0.97, 0.999, 1 / 3])
@pytest.mark.parametrize("method", [sp.Smart(), sp.Smart(init="ones"), sp.Magnitude()])
def test_exact_for_every_sparsity_and_tie(sparsity: float, method: object) -> None:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 30), nn.Linear(30, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)  # every score is tied
    pruner = sp.attach(model, method, block=(4, 3), sparsity=sparsity, steps=2)  # type: ignore[arg-type]
    pruner.freeze(force=True)
    assert int(pruner.mask.sum()) == math.ceil((1 - Fraction(str(sparsity)).limit_denominator(10**9)) * pruner.plan.n)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.95])
def test_budgets_are_not_exceeded_and_missed_by_less_than_a_block(small: Case, share: float) -> None:
    for budget in (sp.params(share), sp.macs(share, example=small.x)):
        model = Case(small.name)
        pruner = model.attach(budget=budget)
        optimizer = model.optimizer()
        model.train(pruner, optimizer, 4)
        cost, limit = pruner.plan.cost, pruner.plan.limit
        assert limit == math.floor((1 - Fraction(str(share))) * int(cost.sum()))
        kept = int(cost[pruner.mask].sum())
        assert kept <= limit
        left_out = cost[~pruner.mask]
        assert limit - kept < int(left_out[left_out > 0].min())
        sp.bake(model.model)


def test_floor_keeps_every_layer_alive() -> None:
    model = Case("plain_cnn")
    with torch.no_grad():
        model.model[3].weight.mul_(1e-3)  # without a floor this layer loses everything
    pruner = model.attach(sp.Smart(), floor=0.1, sparsity=0.85)
    pruner.freeze(force=True)
    for layer in pruner.plan.layers:
        assert int(pruner.mask[layer.start : layer.stop].sum()) >= math.ceil(Fraction("0.1") * layer.n)
    assert int(pruner.mask.sum()) == pruner.plan.keep


def test_hardening_ranks_scores_and_not_masks() -> None:
    """Far below the threshold all masks are the same number; the block that a floor keeps is still the best of its layer."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    pruner = sp.attach(
        model, sp.Smart(follow=False, reach=None), block=(4, 4), sparsity=0.5, floor=0.01, include=["0", "1"], steps=4
    )
    first = pruner.plan.layers[0]
    with torch.no_grad():
        pruner.parameters()[0].copy_(torch.linspace(1e6, 2e6, pruner.plan.n))
        pruner.parameters()[0][: first.stop] = torch.linspace(1.0, 2.0, first.n)
    low = pruner.mask[: first.stop]
    assert bool((low == low[0]).all())
    pruner.freeze(force=True)
    assert pruner.mask[: first.stop].nonzero().flatten().tolist() == [first.n - 1]
