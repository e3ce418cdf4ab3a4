"""Searches that start from scores of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def attach(method: Any = "smart", **options: Any) -> sp.Pruner:
    return sp.attach(network(), method, block=(4, 4), sparsity=0.5, steps=20, **options)


@pytest.mark.parametrize("method", [sp.Smart(), sp.Smart.paper(), sp.Smart(unit="band"), sp.Smart(init="share")], ids=str)
def test_scores_start_in_the_given_order_and_keep_their_values(method: sp.Method) -> None:
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).double().exp()
    plain, pruner = attach(method), attach(method, start=order)
    assert bool((pruner.scores[order.argsort()].diff() >= 0).all())
    assert torch.equal(pruner.scores.sort().values, plain.scores.sort().values)
    assert pruner.tau == plain.tau
    pruner.freeze(force=True)
    assert set(pruner.mask.nonzero()[:, 0].tolist()) == set(order.argsort()[12:].tolist())


def test_equal_entries_keep_the_order_of_the_method() -> None:
    assert torch.equal(attach(start=torch.zeros(24)).scores, attach().scores)


def test_the_first_steps_do_not_return_to_the_magnitudes() -> None:
    order = torch.arange(24.0)
    pruner = attach(start=order.tolist())
    optimizer = torch.optim.SGD(pruner.model.parameters(), lr=1e-4)
    for _ in range(3):
        pruner.model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    ranks = pruner.scores.argsort().argsort().double()
    assert float(torch.corrcoef(torch.stack([ranks, order.double()]))[0, 1]) > 0.95


def test_saliencies_are_the_order_in_which_prune_removes_blocks() -> None:
    data = [torch.randn(32, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    costs = sp.saliencies(model, data, block=(4, 4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for sparsity in (0.25, 0.75):
        pruned = network()
        sp.prune(pruned, data, block=(4, 4), sparsity=sparsity)
        pruner = attach("magnitude")  # reads which blocks are zero
        kept = pruner.plan.blocks(pruned).mean(torch.abs) > 0
        assert set(kept.nonzero()[:, 0].tolist()) == set(costs.argsort()[int(24 * sparsity) :].tolist())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"start": torch.zeros(3)}, r"start has the shape \[3\], and the model has 24 blocks; give one number per block"),
    "NaN": ({"start": torch.full((24,), torch.nan)}, "start contains NaN"),
    "text": ({"start": "magnitude"}, "start is a str"),
    "no scores": ({"method": "gradual", "start": torch.zeros(24)}, "gradual learns no scores"),
    "ones": ({"method": sp.Smart(init="ones"), "start": torch.zeros(24)}, "init='ones' makes all scores equal"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_starts_are_refused_and_the_model_stays_plain(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(sp.SmartpruneError, match=message):
        attach(**options)
