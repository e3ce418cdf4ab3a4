"""The cap per layer of AC/DC and AWG: no layer loses more than a share ``mspl`` of its blocks.

It keeps layers from losing all blocks if the budget leaves room for that. In a network of many small layers and at a high sparsity
it determines the whole mask, or cannot be met at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.budget import as_share
from ..core.vector import Blocks
from ..errors import SmartpruneError
from .method import choose, within

POLICIES = ("strict", "relax", "off")


def least(blocks: Blocks, mspl: float) -> Tensor:
    """``n_l - floor(mspl * n_l)``: the fewest blocks each layer keeps, int64 [number of layers]."""
    share = as_share(mspl, "mspl", "the largest share of its blocks that a layer loses")
    return torch.tensor([layer.n - math.floor(share * layer.n) for layer in blocks.layers], device="cpu")


def least_cost(blocks: Blocks, counts: Tensor, cost: Tensor | None = None) -> int:
    """The cost of the cheapest blocks that give every layer its count. ``cost`` [n] replaces the one of the budget."""
    cost = blocks.cost if cost is None else cost
    if cost is None:
        return int(counts.sum())
    cost = cost.cpu()
    return sum(
        int(cost[layer.start : layer.stop].sort().values[:count].sum())
        for layer, count in zip(blocks.layers, counts.tolist(), strict=True)
    )


def check_cap(where: str, blocks: Blocks, mspl: float, cap: str) -> None:
    choose(f"{where}: cap", cap, POLICIES)
    within(f"{where}: mspl", mspl, 0, 1 - 1e-9)
    if cap == "strict":
        need = least_cost(blocks, least(blocks, mspl))
        if need > blocks.limit:
            unit = "blocks" if blocks.cost is None else "cost"
            raise SmartpruneError(
                f"{where}: mspl={mspl:g} needs {need:,} {unit}, the budget keeps {blocks.limit:,}; remove less, raise mspl, "
                "or set cap='relax' (layers keep less, at least one block while that fits) or cap='off'"
            )


def capped_floor(blocks: Blocks, mspl: float, cap: str) -> Tensor | None:
    """The fewest blocks that each layer keeps under a policy, and never fewer than the budget's floor."""
    floor = blocks.min_keep
    if cap == "off":
        return floor
    counts = least(blocks, mspl)
    if cap == "relax":
        return _relaxed(blocks, counts, torch.zeros_like(counts) if floor is None else floor.cpu())
    return counts if floor is None else torch.maximum(counts, floor.cpu())


def _relaxed(blocks: Blocks, full: Tensor, floor: Tensor) -> Tensor:
    """The counts scaled down until they fit: at least one block per layer, then none for the smallest layers, and never fewer than
    ``floor``, which fits."""
    for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0):
        counts = torch.maximum((full * share).floor().long().clamp(min=1), floor)
        if least_cost(blocks, counts) <= blocks.limit:
            return counts
    for index in torch.tensor([layer.n for layer in blocks.layers], device="cpu").argsort(stable=True).tolist():
        counts[index] = floor[index]
        if least_cost(blocks, counts) <= blocks.limit:
            break
    return counts
