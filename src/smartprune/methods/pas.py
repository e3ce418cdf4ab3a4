"""PaS: pruning as search (Li et al. 2022, on blocks), with a learned score per block, hard in the forward pass, and a penalty.

``mask = 1[v > 0.5]`` with straight-through gradients to v. The user adds ``penalty = strength * (kept share - target share)^2`` to
the loss. The final share depends on ``strength``; ``exact`` makes it meet the budget.
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
    """PaS: pruning as search, with a learned score per block, a hard mask in the forward pass and a penalty in the loss.

    Add ``pruner.penalty()`` to your loss.

    Args:
        strength: The factor of the penalty.
        start: The initial scores.
        spread: The width of uniform noise on the initial scores, the same for every seed, so that they do not all cross one half
            together.
        exact: Whether the mask meets the budget at the end. Otherwise every block with a score above one half is kept.

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Pas(strength=10.0).exact
        True
    """

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
        """The scores, plus a term for the size of the weights that is so small that it only orders equal scores."""
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
    """Finds a strength whose run ends near the share ``wanted``, by bisection on a logarithmic scale. The paper did this by hand.

    ``kept_share(strength)`` makes a run and returns the share that it kept. Returns the strength, or None if no trial came within
    ``tolerance``, and all trials.

    >>> find_strength(lambda strength: 1 / (1 + strength / 10), wanted=0.09)[0]
    100.0
    """
    if not 0 < low < high:
        raise SmartpruneError(f"find_strength: low={low!r} and high={high!r} must be positive, and low < high")
    results: list[tuple[float, float]] = []
    for _ in range(trials):
        strength = float(f"{math.sqrt(low * high):.7g}")
        share = kept_share(strength)
        results.append((strength, share))
        if abs(share - wanted) <= tolerance:
            return strength, results
        low, high = (strength, high) if share > wanted else (low, strength)
    return None, results
