"""Gradual magnitude: the smallest blocks are removed a few at a time along a cubic ramp, and may return.

Every update keeps the blocks with the largest mean absolute weight, as many as the ramp allows. Removed blocks keep their stored
weights, so a block that was removed too early returns when others become smaller (Zhu and Gupta 2017, on blocks, over all layers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.schedule import cubic
from ..core.vector import Blocks
from ..topk import hard_topk
from .balanced import balanced_rank
from .method import Change, Clock, State, choose, count, lists_settings, within


@lists_settings
@dataclass(frozen=True)
class Gradual:
    """Gradual magnitude pruning: removes the smallest blocks along a cubic ramp. A removed block returns if others become smaller.

    Args:
        ramp: The share of the search in which sparsity rises.
        updates: How many times the mask is chosen, at most once per step.
        norm: The size of a block: ``"mean"`` of |w|, ``"l2"``, ``"share"`` (of its layer) or ``"balanced"`` (between magnitude
            and share). Use ``"balanced"`` in a short search or on a small network, where ``"mean"`` nearly empties some layers.
        through: Whether removed weights train too, with the gradient of the masked weights (straight-through).

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Gradual(norm="balanced").ramp
        1.0
    """

    name: ClassVar[str] = "gradual"
    why_not_capturable: ClassVar[str | None] = None

    ramp: float = 1.0
    updates: int = 200
    norm: str = "mean"
    through: bool = False

    @property
    def straight_through(self) -> bool:
        return self.through

    @property
    def needs_float64(self) -> bool:
        return self.norm != "mean"

    def check(self, blocks: Blocks, steps: int) -> None:
        within("Gradual: ramp", self.ramp, 1e-6, 1)
        choose("Gradual: norm", self.norm, ("mean", "l2", "share", "balanced"))
        choose("Gradual: through", self.through, (True, False))
        count("Gradual: updates", self.updates)

    def state(self, blocks: Blocks) -> State:
        return {"mask": torch.ones(blocks.n, device=blocks.device)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        return state["mask"]  # type: ignore[no-any-return]

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        if clock.enters(min(self.updates, clock.steps)) is None:
            return Change()
        limit = math.ceil(cubic(min(1.0, clock.progress / self.ramp), float(blocks.total), float(blocks.limit)))
        rank = self.rank(blocks, state)
        mask = hard_topk(rank, limit, blocks.cost, blocks.min_keep, blocks.layer.to(rank.device))
        return Change({"mask": mask.to(torch.float32)})

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        if self.norm == "share":
            return blocks.share()
        if self.norm == "balanced":
            return balanced_rank(blocks)
        return blocks.mean(torch.abs) if self.norm == "mean" else blocks.norms()
