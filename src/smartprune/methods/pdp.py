"""PDP: a soft mask straight from the weights, inside each layer (Cho et al. 2023, on blocks).

With q the L2 norm of a block and t the middle between the smallest kept and the largest removed norm of its layer,
``mask = sigmoid((q^2 - t^2) / tau)``; gradients reach the weights through the mask too, and push undecided blocks away from
the border. No scores: blocks compete within their layer only, and every layer's share is fixed beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..topk import hard_topk
from .method import State, choose, lists_settings, within


@lists_settings
@dataclass(frozen=True)
class Pdp:
    """``tau``: temperature, in units of squared norms; ``ramp``: share of the search in which sparsity rises, linearly;
    ``allocation``: uniform (the same share of every layer, by largest remainder) or global_once (what one global choice by
    norm gives each layer at the start)."""

    name: ClassVar[str] = "pdp"
    plain_autograd: ClassVar[bool] = True
    needs_whole_weights: ClassVar[bool] = True

    tau: float = 1e-4
    ramp: float = 0.8
    allocation: str = "uniform"

    def check(self, blocks: Blocks, steps: int) -> None:
        choose("Pdp: allocation", self.allocation, ("uniform", "global_once"))
        within("Pdp: tau", self.tau, 1e-12, 1e6)
        within("Pdp: ramp", self.ramp, 1e-6, 1)

    def state(self, blocks: Blocks) -> State:
        if self.allocation == "uniform":
            own = None if blocks.min_keep is None else blocks.min_keep.tolist()
            counts = apportion([layer.n for layer in blocks.layers], Fraction(blocks.limit, max(blocks.total, 1)), own)
        else:
            rank = blocks.norms()
            chosen = hard_topk(rank, blocks.limit, blocks.cost, blocks.min_keep, blocks.layer.to(rank.device))
            counts = [int(value) for value in blocks.per_layer(chosen.to(torch.float64)).tolist()]
        return {"keep": torch.tensor(counts, dtype=torch.float64, device=blocks.device)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {"done": min(1.0, progress / self.ramp)}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        squares = blocks.squares()
        border = self.border(blocks, state, squares.detach())
        return torch.sigmoid((squares - border[blocks.layer.to(squares.device)]) / self.tau)

    def border(self, blocks: Blocks, state: State, squares: Tensor) -> Tensor:
        """t^2 of every layer, [number of layers]; minus infinity where the layer keeps all its blocks."""
        layer, total = blocks.layer.to(squares.device), blocks.counts.to(squares.device)
        kept = total - ((total - state["keep"]) * state["done"] + 0.5).floor().long()
        first = total.cumsum(0) - total
        norms = squares[_by_layer(squares, layer)].sqrt()
        low = norms[first + kept.clamp(max=total - 1)]
        high = norms[first + (kept - 1).clamp(min=0)]
        middle = torch.where(kept == 0, 2 * high + 1e-12, (low + high) / 2)
        return torch.where(kept == total, -math.inf, middle.square())

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        """Norms, those that their layer keeps before all others."""
        norms = blocks.norms()
        layer, total = blocks.layer.to(norms.device), blocks.counts.to(norms.device)
        order = _by_layer(norms, layer)
        places = torch.empty_like(order)  # of a block in its layer, by size: equal ones have different places
        places[order] = torch.arange(len(order), device=order.device) - (total.cumsum(0) - total)[layer[order]]
        inside = places < state["keep"][layer]
        out: Tensor = norms / norms.max().clamp(min=torch.finfo(norms.dtype).tiny) + 2.0 * inside
        return out


def _by_layer(sizes: Tensor, layer: Tensor) -> Tensor:
    """The blocks in the order of their layers, and within each from the largest."""
    order = sizes.argsort(descending=True, stable=True)
    return order[layer[order].argsort(stable=True)]


def apportion(sizes: list[int], share: Fraction, own: list[int] | None = None) -> list[int]:
    """``floor(share * total)`` seats for layers of these sizes by largest remainder, at least one each while that fits, and what a
    floor guarantees each (``own``).

    >>> apportion([100, 10, 1], Fraction(1, 4))
    [24, 2, 1]
    """
    seats = math.floor(share * sum(sizes))
    quotas = [share * size for size in sizes]
    least = [max(1 if seats >= len(sizes) else 0, count) for count in own or [0] * len(sizes)]
    seats = max(seats, sum(least))
    counts = [max(few, math.floor(quota)) for few, quota in zip(least, quotas, strict=True)]
    while sum(counts) < seats:  # whoever is owed most; one that has its guaranteed seat is owed less
        i = max((i for i in range(len(sizes)) if counts[i] < sizes[i]), key=lambda i: (quotas[i] - counts[i], sizes[i]))
        counts[i] += 1
    while sum(counts) > seats:  # the guaranteed seats of small layers come out of the largest
        i = max(range(len(sizes)), key=lambda j: (counts[j] - quotas[j], counts[j]) if counts[j] > least[j] else (-math.inf, 0))
        counts[i] -= 1
    return counts
