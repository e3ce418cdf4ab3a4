"""The choice of blocks from the costs of their removal, compared with plain Python."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.pruning.oneshot.allocate import choose, with_barriers
from smartprune.pruning.plan import Plan


def plan_of(count: int = 2, **options: object) -> Plan:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])
    return sp.plan(model, (2, 2), include="*", **{"sparsity": 0.5, **options})  # type: ignore[arg-type]


def costs_of(plan: Plan) -> Tensor:
    return torch.rand(plan.n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.01


def test_barriers_follow_the_formula() -> None:
    plan = plan_of()
    costs = costs_of(plan)
    result = with_barriers(plan.layers, costs)
    for layer in plan.layers:
        values = costs[layer.start : layer.stop].tolist()
        total, removed = sum(values), 0.0
        for index in sorted(range(layer.n), key=lambda i: values[i])[:-1]:
            before, removed = removed, removed + values[index]
            expected = total / (1 - removed / total) - total / (1 - before / total)
            assert float(result[layer.start + index]) == pytest.approx(expected, rel=1e-6)


def test_the_order_within_a_layer_is_kept_and_first_removals_cost_what_they_did() -> None:
    plan = plan_of()
    costs = costs_of(plan)
    costs[3] = 1e-6
    result = with_barriers(plan.layers, costs)
    assert float(result[3]) == pytest.approx(1e-6, rel=1e-3)
    assert bool((result >= costs).all())
    for layer in plan.layers:
        part = slice(layer.start, layer.stop)
        assert torch.equal(costs[part].argsort(), result[part].argsort())


def test_layers_without_costs_stay_free() -> None:
    plan = plan_of()
    costs = costs_of(plan)
    costs[: plan.layers[0].stop] = 0
    assert not with_barriers(plan.layers, costs)[: plan.layers[0].stop].any()


def test_a_layer_of_small_costs_keeps_a_block_if_the_budget_allows() -> None:
    """Without barriers the first layer would lose all of its blocks before the second loses any."""
    plan = plan_of(sparsity=0.9)
    costs = costs_of(plan)
    costs[: plan.layers[0].stop] *= 1e-9
    mask = choose(plan, costs)
    assert int(mask.sum()) == 4
    assert [bool(mask[layer.start : layer.stop].any()) for layer in plan.layers] == [True, True]


@pytest.mark.parametrize("part", [Fraction(1, 3), Fraction(1, 2), Fraction(1)])
def test_a_part_of_the_budget_removes_that_part(part: Fraction) -> None:
    plan = plan_of(3, sparsity=0.75)
    assert int((~choose(plan, costs_of(plan), part)).sum()) == int(part * 36)


def test_blocks_that_take_more_of_the_budget_are_removed_first_at_equal_cost() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, stride=4), nn.Conv2d(4, 4, 1))
    plan = sp.plan(model, (2, 2), budget=sp.macs(0.5, example=torch.zeros(1, 4, 8, 8)), include="*")
    mask = choose(plan, torch.ones(plan.n, dtype=torch.float64))
    assert plan.cost is not None
    assert plan.limit is not None
    assert int(plan.cost[mask].sum()) <= plan.limit
    kept = [int(mask[layer.start : layer.stop].sum()) for layer in plan.layers]
    assert kept[0] < kept[1]
