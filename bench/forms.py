"""Pruning methods that bench/proxy.py compares and the library does not have: references and prototypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from smartprune.core.schedule import cubic
from smartprune.core.vector import Blocks
from smartprune.methods import Gradual, Smart
from smartprune.methods.method import Change, Clock, State, lists_settings
from smartprune.topk import hard_topk


@lists_settings
@dataclass(frozen=True)
class Regrow:
    """Gradual magnitude with regrowth by gradient (RigL, on a cubic ramp as in GraNet).

    Each of ``updates`` removes the smallest blocks along the ramp, and a ``share`` of the kept ones, which falls along a cosine.
    The same number of removed blocks, those with the largest gradient norm, return with zero weights.
    """

    name: ClassVar[str] = "regrow"
    straight_through: ClassVar[bool] = True  # gradients reach removed blocks, whose weights are reset to zero

    updates: int = 50
    share: float = 0.1

    def check(self, blocks: Blocks, steps: int) -> None: ...

    def state(self, blocks: Blocks) -> State:
        return {"mask": torch.ones(blocks.n, device=blocks.device)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        return state["mask"]  # type: ignore[no-any-return]

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        mask = state["mask"]
        if clock.enters(min(self.updates, clock.steps)) is not None:
            limit = math.ceil(cubic(min(1.0, clock.progress), float(blocks.total), float(blocks.limit)))
            removed = blocks.n - limit
            moving = int(self.share * 0.5 * (1 + math.cos(math.pi * clock.progress)) * min(limit, removed))
            size = blocks.mean(torch.abs)
            kept = hard_topk(size, limit - moving, blocks.cost, blocks.min_keep, blocks.layer.to(size.device))
            gradients = torch.cat(
                [
                    layer.grid.sum(w.grad.float().square())
                    for layer, w in zip(blocks.layers, blocks.weights, strict=True)
                    if w.grad is not None
                ]
            )
            grown = hard_topk((gradients / blocks.sizes).masked_fill(kept, -1.0), moving)
            mask = (kept | grown).to(torch.float32)
        return Change({"mask": mask}, multiply=mask)

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        return blocks.mean(torch.abs)


@lists_settings
@dataclass(frozen=True)
class Through(Smart):
    """SMART with the gradient of the masked weights, without the mask, so removed blocks train too."""

    name: ClassVar[str] = "smart through"

    @property
    def straight_through(self) -> bool:
        return True


@lists_settings
@dataclass(frozen=True)
class Hard(Smart):
    """SMART with a hard mask in the forward pass and the gradients of the soft one."""

    name: ClassVar[str] = "smart hard"

    def mask(self, blocks: Blocks, state: State, seed: int | None = None) -> Tensor:
        soft = super().mask(blocks, state, seed)
        return soft + ((soft > 0.5).to(soft.dtype) - soft).detach()


@lists_settings
@dataclass(frozen=True)
class Fixed(Smart):
    """SMART whose scores follow the weights and do not learn: a soft gradual magnitude."""

    name: ClassVar[str] = "smart fixed"

    def mask(self, blocks: Blocks, state: State, seed: int | None = None) -> Tensor:
        state = {**state, "scores": state["scores"].detach() + 0 * state["scores"]}
        return super().mask(blocks, state, seed)


@lists_settings
@dataclass(frozen=True)
class Leaky(Smart):
    """SMART whose learned part decays: every hundredth of the search removes the share ``leak`` of it."""

    name: ClassVar[str] = "smart leaky"

    leak: float = 0.05

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        change = super().update(blocks, state, clock)
        retention = (1 - self.leak) ** (100 / clock.steps)
        scores = change.state["scores"]
        scores = state["began"] + (scores - state["began"]) * retention
        change.state["scores"] = change.state["before"] = scores
        return change


def blend(blocks: Blocks, balance: float) -> Tensor:
    """A mixture of the log of a block's mean square (balance 0) and the log of its share of the layer (balance 1)."""
    squares = blocks.mean(torch.square)
    return (1 - balance) * squares.clamp(min=1e-30).log() + balance * blocks.share()


@lists_settings
@dataclass(frozen=True)
class GradualBlend(Gradual):
    """Gradual magnitude that ranks between magnitude (0) and share of the layer (1)."""

    name: ClassVar[str] = "gradual blend"

    balance: float = 0.5

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        return blend(blocks, self.balance)


@lists_settings
@dataclass(frozen=True)
class SmartBlend(Smart):
    """SMART whose scores start from, and follow, a ranking between magnitude (0) and share of the layer (1)."""

    name: ClassVar[str] = "smart blend"

    balance: float = 0.5

    def measure(self, blocks: Blocks) -> Tensor:
        return blend(blocks, self.balance)


FORMS: dict[str, Any] = {form.name: form for form in (Regrow, Through, Hard, Fixed, Leaky, GradualBlend, SmartBlend)}
