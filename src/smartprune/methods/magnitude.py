"""Magnitude: keeps the blocks with the largest mean absolute weight, chosen once, before fine-tuning.

It is the baseline of every comparison: SMART with a hard mask from the first step does the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..topk import hard_topk
from .method import State, choose, lists_settings


@lists_settings
@dataclass(frozen=True)
class Magnitude:
    """One-shot magnitude pruning: keeps the largest blocks, chosen once at the start. The baseline of every comparison.

    Args:
        norm: The size of a block: ``"mean"`` of |w| over its elements, or ``"l2"`` (its Euclidean norm).

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Magnitude(norm="l2")
        Magnitude(norm='l2')
    """

    name: ClassVar[str] = "magnitude"
    why_not_capturable: ClassVar[str | None] = None

    norm: str = "mean"

    @property
    def needs_float64(self) -> bool:
        return self.norm != "mean"

    def check(self, blocks: Blocks, steps: int) -> None:
        choose("Magnitude: norm", self.norm, ("mean", "l2"))

    def state(self, blocks: Blocks) -> State:
        rank = blocks.mean(torch.abs) if self.norm == "mean" else blocks.norms()
        mask = hard_topk(rank, blocks.limit, blocks.cost, blocks.min_keep, blocks.layer.to(rank.device))
        return {"rank": rank, "mask": mask.to(torch.float32)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        return state["mask"]  # type: ignore[no-any-return]

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        return state["rank"]  # type: ignore[no-any-return]
