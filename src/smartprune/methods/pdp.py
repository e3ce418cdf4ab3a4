"""PDP: a soft mask computed from the weights, within each layer (Cho et al. 2023, on blocks).

With q the L2 norm of a block and t the middle between the smallest kept and the largest removed norm of its layer,
``mask = sigmoid((q^2 - t^2) / tau)``. Gradients reach the weights through the mask too, and push undecided blocks away from the
threshold. There are no scores: blocks compete within their layer only, and the share of every layer is fixed beforehand.
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
    """PDP: a soft mask that is computed from the weights, within each layer, with a share per layer that is fixed beforehand.

    Args:
        tau: The temperature, in units of squared norms.
        ramp: The share of the search in which sparsity rises linearly.
        allocation: ``"uniform"``: every layer loses the same share, by largest remainder. ``"global_once"``: the share that one
            global choice by norm gives each layer at the start.

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Pdp().allocation
        'uniform'
    """

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
            floor = None if blocks.min_keep is None else blocks.min_keep.tolist()
            counts = apportion([layer.n for layer in blocks.layers], Fraction(blocks.limit, max(blocks.total, 1)), floor)
        else:
            rank = blocks.norms()
            chosen = hard_topk(rank, blocks.limit, blocks.cost, blocks.min_keep, blocks.layer.to(rank.device))
            counts = [int(value) for value in blocks.per_layer(chosen.to(torch.float64)).tolist()]
        return {"keep": torch.tensor(counts, dtype=torch.float64, device=blocks.device)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {"done": min(1.0, progress / self.ramp)}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        squares = blocks.squares()
        threshold = self.threshold(blocks, state, squares.detach())
        return torch.sigmoid((squares - threshold[blocks.layer.to(squares.device)]) / self.tau)

    def threshold(self, blocks: Blocks, state: State, squares: Tensor) -> Tensor:
        """t^2 of every layer, [number of layers]; minus infinity if the layer keeps all its blocks."""
        layer, total = blocks.layer.to(squares.device), blocks.counts.to(squares.device)
        kept = total - ((total - state["keep"]) * state["done"] + 0.5).floor().long()
        first = total.cumsum(0) - total
        norms = squares[_by_layer(squares, layer)].sqrt()
        low = norms[first + kept.clamp(max=total - 1)]
        high = norms[first + (kept - 1).clamp(min=0)]
        middle = torch.where(kept == 0, 2 * high + 1e-12, (low + high) / 2)
        return torch.where(kept == total, -math.inf, middle.square())

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        """L2 norms. The blocks that their layer keeps come before all others."""
        norms = blocks.norms()
        layer, total = blocks.layer.to(norms.device), blocks.counts.to(norms.device)
        order = _by_layer(norms, layer)
        position = torch.empty_like(order)  # of a block in its layer, by size; equal blocks have different positions
        position[order] = torch.arange(len(order), device=order.device) - (total.cumsum(0) - total)[layer[order]]
        is_kept = position < state["keep"][layer]
        out: Tensor = norms / norms.max().clamp(min=torch.finfo(norms.dtype).tiny) + 2.0 * is_kept
        return out


def _by_layer(sizes: Tensor, layer: Tensor) -> Tensor:
    """The blocks in the order of their layers, and from the largest to the smallest within each layer."""
    order = sizes.argsort(descending=True, stable=True)
    return order[layer[order].argsort(stable=True)]


def apportion(sizes: list[int], share: Fraction, floor: list[int] | None = None) -> list[int]:
    """Distributes ``int(share * total)`` blocks over layers of these sizes by largest remainder. Every layer gets at least its
    ``floor``, and one block while that fits.

    >>> apportion([100, 10, 1], Fraction(1, 4))
    [24, 2, 1]
    """
    total = math.floor(share * sum(sizes))
    quotas = [share * size for size in sizes]
    least = [max(1 if total >= len(sizes) else 0, count) for count in floor or [0] * len(sizes)]
    total = max(total, sum(least))
    counts = [max(fewest, math.floor(quota)) for fewest, quota in zip(least, quotas, strict=True)]
    while sum(counts) < total:  # the layer with the largest remainder, which a guaranteed block reduces
        i = max((i for i in range(len(sizes)) if counts[i] < sizes[i]), key=lambda i: (quotas[i] - counts[i], sizes[i]))
        counts[i] += 1
    while sum(counts) > total:  # the guaranteed blocks of small layers are taken from the largest
        i = max(range(len(sizes)), key=lambda j: (counts[j] - quotas[j], counts[j]) if counts[j] > least[j] else (-math.inf, 0))
        counts[i] -= 1
    return counts
