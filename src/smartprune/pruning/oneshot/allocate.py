"""Which blocks are removed within the budget, from what the removal of each costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ...core.layers import Layer
from ...errors import SmartpruneError
from ...topk import hard_topk
from ..plan import Plan

LEAST = 1e-12  # share of a layer's signal that counts as none


def choose(plan: Plan, costs: Tensor, part: Fraction = Fraction(1)) -> Tensor:
    """The hard mask of a plan, bool [n]: the blocks are kept whose removal costs most for what they take of the budget.

    ``part`` of what the budget removes is removed; 1 meets the budget exactly.
    """
    rank = with_barriers(plan.layers, costs)
    if plan.cost is not None:
        rank = rank / plan.cost.double().clamp(min=1e-9)
    rank = rank.log().nan_to_num(neginf=-1e30, posinf=1e30)
    owner = torch.cat([torch.full((layer.n,), i) for i, layer in enumerate(plan.layers)])
    if part == 1 and plan.exact is not None:
        mask = plan.exact.best(rank, plan.min_keep, owner)
        if mask is None:
            raise SmartpruneError(
                f"prune: the blocks that every layer must keep take more than the {plan.exact.limit:,} {plan.unit} of the budget; "
                "lower floor, or remove less"
            )
        return mask
    assert plan.limit is not None
    limit = plan.total - math.floor(part * (plan.total - plan.limit))
    return hard_topk(rank, limit, plan.cost, plan.min_keep, owner if plan.min_keep is not None else None)


def with_barriers(layers: Sequence[Layer], costs: Tensor) -> Tensor:
    """The costs of removal, increased in layers that lose much of their signal, float64 [n].

    Costs are second-order estimates, which hold for small changes. A layer that loses every block costs them too little: nothing
    passes through it any more. With S as the cost of the blocks removed so far and C as that of all blocks of the layer, the sum
    of the increased costs is ``C (1 / (1 - S / C) - 1)``: S at first, and infinite at the end. The order within a layer is kept.
    """
    out = costs.double().clone()
    for layer in layers:
        values, order = out[layer.start : layer.stop].sort(stable=True)
        total = values.sum()
        if not float(total) > 0:
            continue
        left = torch.cat([values.new_ones(1), 1 - values.cumsum(0) / total]).clamp(min=LEAST)
        steps = torch.maximum(total * (1 / left[1:] - 1 / left[:-1]), values)
        out[layer.start + order] = steps.cummax(0).values
    return out
