"""PaS: pruning as search (Li et al. 2022, on blocks). A gate per block, hard in the forward pass, and a penalty.

``mask = 1[v > 0.5]`` with straight-through gradients to v; ``penalty = strength * (kept share - wanted share)^2``, which the user
adds to the loss. Where the share ends depends on ``strength``; hence ``exact``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..errors import SmartpruneError
from .method import State, choose, lists_settings, within


@lists_settings
@dataclass(frozen=True)
class Pas:
    """``strength``: lambda of the penalty; ``start``: value of the gates at the start; ``spread``: width of a uniform noise on it,
    the same for every seed, which keeps gates from crossing all at once; ``exact``: at the end keep the highest gates that the
    budget allows, not those above one half, wherever the penalty left them."""

    name: ClassVar[str] = "pas"

    strength: float = 100.0
    start: float = 0.6
    spread: float = 0.0
    exact: bool = True

    def check(self, blocks: Blocks, steps: int) -> None:
        within("Pas: strength", self.strength, 0, 1e12)
        within("Pas: start", self.start, 0, 1)
        within("Pas: spread", self.spread, 0, 1)
        choose("Pas: exact", self.exact, (True, False))

    def state(self, blocks: Blocks) -> State:
        noise = torch.rand(blocks.n, generator=torch.Generator("cpu").manual_seed(0), device="cpu") - 0.5
        return {"gates": (self.start + self.spread * noise).to(blocks.device).requires_grad_()}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        gates: Tensor = state["gates"]
        return (gates.detach() > 0.5).to(gates.dtype) + (gates - gates.detach())

    def penalty(self, blocks: Blocks, state: State) -> Tensor:
        mask = self.mask(blocks, state, None)
        cost = blocks.soft_cost
        share = mask.mean() if cost is None else (mask * cost).sum() / cost.sum()
        return self.strength * (share - blocks.limit / blocks.total) ** 2

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        """Gates; equal ones, such as all at the start, by the size of their weights, which is too small to decide otherwise."""
        gates, size = state["gates"].detach().double(), blocks.mean(torch.abs).double()
        out: Tensor = gates + 1e-9 * size / size.max().clamp(min=1e-30)
        return out

    def final(self, blocks: Blocks, state: State) -> Tensor | None:
        return None if self.exact else state["gates"].detach() > 0.5


def find_strength(
    kept_share: Callable[[float], float],
    wanted: float,
    low: float = 1.0,
    high: float = 1e4,
    tolerance: float = 0.005,
    trials: int = 6,
) -> tuple[float | None, list[tuple[float, float]]]:
    """Bisection on a logarithmic scale for a strength whose run ends near the wanted share, as the paper had to do by hand.

    ``kept_share(strength)`` makes a run and says which share it kept. Gives the strength, or None where no trial came within
    ``tolerance``, and all trials.

    >>> find_strength(lambda strength: 1 / (1 + strength / 10), wanted=0.09)[0]
    100.0
    """
    if not 0 < low < high:
        raise SmartpruneError(f"find_strength: low={low!r} and high={high!r} must be positive and in this order")
    tried: list[tuple[float, float]] = []
    for _ in range(trials):
        strength = float(f"{math.sqrt(low * high):.7g}")
        share = kept_share(strength)
        tried.append((strength, share))
        if abs(share - wanted) <= tolerance:
            return strength, tried
        low, high = (strength, high) if share > wanted else (low, strength)
    return None, tried
