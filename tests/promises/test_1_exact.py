"""Promise 1: exactly ceil((1 - sparsity) * N) blocks are kept, and no budget is exceeded."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case


def count_blocks(weight: torch.Tensor, layer: object) -> int:
    """Counts blocks that hold a nonzero value, with slow loops over the stored axes."""
    axes = layer.grid.axes  # type: ignore[attr-defined]
    seen = set()
    for index in weight.nonzero().tolist():
        place = []
        for i, axis in zip(index, axes, strict=True):
            part, rest = divmod(i, axis.length)
            place.append((part, rest // axis.step))
        seen.add(tuple(place))
    return len(seen)


def test_every_model_keeps_the_exact_number_of_blocks(case: Case) -> None:
    pruner = case.attach()
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 5)
    n = pruner.plan.n
    keep = math.ceil((1 - Fraction("0.8")) * n)
    assert int(pruner.mask.sum()) == keep
    receipt = sp.bake(case.model)
    named = dict(case.model.named_parameters())
    counted = sum(count_blocks(named[layer.weight], layer) for layer in pruner.plan.layers)
    assert counted == keep
    assert receipt.to_json()["mask_hash"].startswith("sha256:")


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.93, 0.95, 0.97, 0.999, 1 / 3])
@pytest.mark.parametrize("method", [sp.Smart(), sp.Smart(init="ones"), sp.Magnitude()])
def test_counts_are_exact_for_every_sparsity_when_all_scores_tie(sparsity: float, method: object) -> None:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 30), nn.Linear(30, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)  # every score is tied
    pruner = sp.attach(model, method, block=(4, 3), sparsity=sparsity, steps=2)  # type: ignore[arg-type]
    pruner.freeze(force=True)
    assert int(pruner.mask.sum()) == math.ceil((1 - Fraction(str(sparsity)).limit_denominator(10**9)) * pruner.plan.n)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.77, 0.95])
def test_cost_budgets_are_met_to_less_than_one_block(small: Case, share: float) -> None:
    for budget in (sp.params(share), sp.macs(share, example=small.x)):
        model = Case(small.name)
        pruner = model.attach(budget=budget)
        optimizer = model.optimizer()
        model.train(pruner, optimizer, 4)
        cost, limit = pruner.plan.cost, pruner.plan.limit
        assert limit == math.floor((1 - Fraction(str(share))) * int(cost.sum()))
        kept = int(cost[pruner.mask].sum())
        assert kept <= limit
        removed = cost[~pruner.mask]
        assert limit - kept < int(removed[removed > 0].min())
        sp.bake(model.model)


def test_floor_keeps_its_share_of_every_layer() -> None:
    model = Case("plain_cnn")
    with torch.no_grad():
        model.model[3].weight.mul_(1e-3)  # without a floor this layer loses everything
    pruner = model.attach(sp.Smart(), floor=0.1, sparsity=0.85)
    pruner.freeze(force=True)
    for layer in pruner.plan.layers:
        assert int(pruner.mask[layer.start : layer.stop].sum()) >= math.ceil(Fraction("0.1") * layer.n)
    assert int(pruner.mask.sum()) == pruner.plan.keep


def test_freeze_ranks_scores_where_soft_masks_are_saturated() -> None:
    """All soft masks of the first layer are equal, but the floor still keeps the block with the highest score."""
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
