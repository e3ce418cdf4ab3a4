"""The budget of a plan: which one was given, whether it is valid, and what the floor costs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.core.budget import ResolvedBudget
from smartprune.pruning.plan_budget import cheapest, one_budget, resolve_budget, without_example


def planned() -> tuple[nn.Module, sp.Plan]:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, sp.plan(model, block=(4, 4))


@dataclass(frozen=True)
class Fixed:
    """A budget that resolves to what it is given."""

    share: float
    resolved: Any
    kind: str = "fixed"
    unit: str = "units"
    label: str = "fixed"
    of: str = "layers"

    def resolve(self, model: nn.Module, layers: Any) -> Any:
        return self.resolved


def test_sparsity_is_a_budget_in_blocks() -> None:
    budget = one_budget(0.75, None)
    assert budget is not None
    assert (budget.kind, Fraction(str(budget.share))) == ("blocks", Fraction(3, 4))
    assert one_budget(None, None) is None


@pytest.mark.parametrize(
    ("sparsity", "budget", "message"),
    [
        (0.5, sp.params(0.5), "sparsity=0.5 and budget=.* are both given; give one of them"),
        (None, 0.5, "budget=0.5 is a float; write sparsity=0.9"),
        (1.5, None, "sparsity"),
        (None, Fixed(0.5, None, kind="Energy use"), "a budget is of kind 'Energy use'; it must be a word"),
    ],
)
def test_a_wrong_budget_raises(sparsity: float | None, budget: Any, message: str) -> None:
    with pytest.raises(sp.SmartpruneError, match=message):
        one_budget(sparsity, budget)


def test_what_resolve_returns_is_checked() -> None:
    model, plan = planned()
    ones = torch.ones(plan.n, dtype=torch.int64)
    good = ResolvedBudget(limit=3, cost=ones)
    assert resolve_budget(Fixed(0.5, good), model, plan.layers, None) is good
    for wrong, message in (
        (3, "returned a int; return a ResolvedBudget"),
        (replace(good, limit=3.0), "returned limit=3.0; it must be an integer"),
        (replace(good, cost=ones[1:]), "it must be int64 with one entry, not negative"),
        (replace(good, cost=ones.double()), "torch.float64; it must be int64"),
        (replace(good, cost=-ones), "not negative"),
    ):
        with pytest.raises(sp.SmartpruneError, match=message):
            resolve_budget(Fixed(0.5, wrong), model, plan.layers, None)


def test_the_cheapest_blocks_are_the_cheapest_of_all_choices() -> None:
    _, plan = planned()
    cost = torch.randint(0, 50, (plan.n,), generator=torch.Generator().manual_seed(0))
    for counts in itertools.product(range(3), repeat=len(plan.layers)):
        best = 0
        for layer, count in zip(plan.layers, counts, strict=True):
            best += min(sum(c) for c in itertools.combinations(cost[layer.start : layer.stop].tolist(), count))
        assert cheapest(plan.layers, cost, torch.tensor(counts)) == best


def test_a_plan_does_not_keep_the_example_of_its_budget() -> None:
    budget = sp.macs(0.5, example=torch.zeros(1, 8))
    kept: Any = without_example(budget)
    assert kept.example is None
    assert kept.share == budget.share
    assert without_example(None) is None
