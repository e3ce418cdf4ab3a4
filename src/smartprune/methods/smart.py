"""SMART: a learnable score per block, a differentiable top-k over all of them, a temperature that falls.

``mask = sigmoid((scores - theta) / tau)`` with theta such that ``sum(cost * mask) = limit`` (paper, equations 2 and 5).
Scores start at the mean of the absolute weights and train with the weights; at the end the highest are kept.

Two things the paper does not have proved themselves and are on by default (docs/beyond.md): scores go along with the weights of
their blocks (``follow``), and have a limit on how far they go in a part of the search (``reach``). ``Smart.paper()`` is the
paper's own form; ``Smart(start=5, end=1e-3, follow=False, reach=None)`` is that form in units of your model's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.schedule import SCHEDULES, cubic
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..topk import hard_topk, soft_topk
from .balanced import balanced_rank
from .method import Change, Clock, State, choose, lists_settings, within

REFRESHES = 200  # times in a search that scores are brought to where the weights are
ROUNDING = 1e-6  # of the mean score: what scores differ by less is no difference of their weights
RAMP_FROM = 0.99  # share of the cost of all blocks that a ramp starts at; below 1, so that scores learn from the first step on


@lists_settings
@dataclass(frozen=True)
class Smart:
    """Settings of SMART. With none given, the temperature range fits the model's own weights.

    - ``start``, ``end``: temperatures, in units of the spread (standard deviation) of the initial scores, or with
      ``unit="absolute"`` as the paper prints them; with ``unit="band"`` they are the share of the kept blocks whose scores lie
      within one temperature of the threshold, however far scores have spread by then;
    - ``schedule``: geometric, paper_exponential, linear, inverse_exponential or fixed;
    - ``init`` of the scores: mean (of |w|), l1 (sum of |w|), share (log of a block's share of its layer, see ``Blocks.share``),
      balanced (log of the mean square, a quarter of the way to that share) or ones;
    - ``follow``: whether scores go along when that number changes because the weights train;
    - ``reach``: how far a score moves in a hundredth of the search at most, in temperatures, whatever the number of steps, the
      learning rate and the optimizer; None: as far as its gradient takes it, which is far enough to decide on every block while
      the mask is still soft. Without ``follow`` it is harmful: scores then stay near where they began. Where there is nothing to
      follow (``init="ones"``, ``train_weights=False``) there is no limit;
    - ``warmup``: the first share of the search, in which the reach grows from nothing to what it is: for a network whose loss is
      far above chance at first, such as one with a last layer of another task. Its scores would learn to switch layers off;
    - ``ramp`` of the budget: none, or cubic (from nearly all blocks down to the budget while the temperature falls); ``hold``:
      the last share of the search, in which the budget is reached and blocks only change places;
    - ``gain``: whether weights are multiplied by ``mask * sum(mask) / sum(mask ** 2)``, where a block counts as much as it costs:
      by 1 while all masks are equal, so that a search starts with the network as it came, and by the mask once it is hard. Without
      it a search for 3 % of the blocks starts with weights at 3 % of their size, and batch norms whose outputs fall below their
      epsilon pass nothing on. Without ``follow`` and ``reach`` it was harmful;
    - ``mask_type``: deterministic; stochastic (Bernoulli samples of the mask); binary (hard forward, straight-through
      gradients to scores and weights); binary_soft (hard forward, gradients of the soft mask);
    - ``train_weights``: whether the pruned weights train during the search;
    - ``clip``: the largest norm of the scores' gradient in one backward pass; those of several are added as always.

    >>> Smart(end=1e-4).end
    0.0001
    """

    name: ClassVar[str] = "smart"

    start: float = 2.0
    end: float = 3e-3
    unit: str = "spread"
    schedule: str = "geometric"
    init: str = "mean"
    follow: bool = True
    reach: float | None = 0.5
    warmup: float = 0.0
    ramp: str = "none"
    hold: float = 0.0
    gain: bool = False
    mask_type: str = "deterministic"
    train_weights: bool = True
    clip: float | None = None

    @classmethod
    def paper(cls, start: float = 0.5, end: float = 1e-5, **settings: Any) -> Smart:
        """The paper's Table 4: absolute temperatures; its printed schedule where that exists, else geometric; scores that are moved
        by their gradients alone."""
        schedule = "paper_exponential" if start - end < 1 else "geometric"
        return cls(start, end, **{"unit": "absolute", "schedule": schedule, "follow": False, "reach": None, **settings})

    @property
    def trains_weights(self) -> bool:
        return self.train_weights

    @property
    def straight_through(self) -> bool:
        return self.mask_type == "binary"

    @property
    def plain_autograd(self) -> bool:
        return self.gain

    @property
    def why_not_capturable(self) -> str | None:
        return None if self.mask_type == "deterministic" else f"mask_type={self.mask_type!r} draws or selects blocks at every step"

    @property
    def _limit(self) -> float | None:
        """The reach that applies. With nothing to follow, scores that may not go far end as ties, or never decide."""
        return None if self.init == "ones" or not self.train_weights else self.reach

    def check(self, blocks: Blocks, steps: int) -> None:
        choose("Smart: unit", self.unit, ("spread", "band", "absolute"))
        choose("Smart: schedule", self.schedule, SCHEDULES)
        choose("Smart: init", self.init, ("mean", "l1", "share", "balanced", "ones"))
        choose("Smart: ramp", self.ramp, ("none", "cubic"))
        choose("Smart: mask_type", self.mask_type, ("deterministic", "stochastic", "binary", "binary_soft"))
        for field in ("follow", "gain", "train_weights"):
            choose(f"Smart: {field}", getattr(self, field), (True, False))
        within("Smart: hold", self.hold, 0, 0.99)
        within("Smart: warmup", self.warmup, 0, 1)
        if self.warmup and self._limit is None:
            raise SmartpruneError(
                f"Smart: warmup={self.warmup:g} is that of a reach, and there is none with reach=None, init='ones' or "
                "train_weights=False; give one, or warmup=0"
            )
        if self.unit == "band" and self._limit is None:
            raise SmartpruneError(
                "Smart: unit='band' takes the temperature from the distance between scores, which have to have a reach, and there "
                "is none with reach=None, init='ones' or train_weights=False; give one, or another unit"
            )
        for field in ("start", "end"):
            value = getattr(self, field)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise SmartpruneError(f"Smart: {field}={value!r} is not a temperature; it must be a positive number")
        if self.schedule != "fixed" and self.end > self.start:
            raise SmartpruneError(f"Smart: end={self.end:g} is above start={self.start:g}; the temperature must fall")
        for field, meaning in (("reach", "positive number of temperatures"), ("clip", "positive norm")):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise SmartpruneError(f"Smart: {field}={value!r} must be a {meaning}, or None for no limit")
        SCHEDULES[self.schedule](0.0, self.start, self.end)  # paper_exponential does not exist everywhere

    def measure(self, blocks: Blocks) -> Tensor:
        """Where the scores start, from the weights as they are."""
        if self.init == "ones":
            return torch.ones(blocks.n, device=blocks.device)
        if self.init == "share":
            return blocks.share()
        if self.init == "balanced":
            return balanced_rank(blocks)
        return blocks.sum(torch.abs) if self.init == "l1" else blocks.mean(torch.abs)

    def state(self, blocks: Blocks) -> State:
        scores = self.measure(blocks)
        sizes = (blocks.mean(torch.abs) if self.init == "ones" else scores).double()
        spread = float(sizes.std(correction=0))
        spread = spread if spread > ROUNDING * float(sizes.abs().mean()) else 0.0  # equal weights, in blocks of different sizes
        unit = 1.0 if self.unit == "absolute" else spread or float(scores.double().abs().mean()) or 1.0
        # where the next search for theta starts, and where the last one ended: (pivot, delta) each. They are two, so that any
        # number of forward passes between two steps starts at the same place and gives the same bits.
        theta = torch.full((2, 2), math.nan, dtype=torch.float64, device=blocks.device)
        out: State = {"scores": scores.clone().requires_grad_(), "unit": unit, "theta": theta}
        if self.follow:
            out |= {"began": scores, "moved": torch.zeros_like(scores)}
        if self._limit is not None:
            out["before"] = scores.clone()
        if self.unit == "band":
            out["tau"] = self._band(blocks, scores, unit, 0.0)
        return out

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        limit = self._budget(blocks, progress)
        if self.unit == "band":
            return {"limit": limit}
        return {"tau": SCHEDULES[self.schedule](progress, self.start, self.end) * state["unit"], "limit": limit}

    def _budget(self, blocks: Blocks, progress: float) -> float:
        limit = float(blocks.limit)
        if self.ramp == "cubic":
            limit = cubic(min(1.0, progress / (1 - self.hold)), max(limit, RAMP_FROM * blocks.total), limit)
        return limit

    def _band(self, blocks: Blocks, scores: Tensor, unit: float, progress: float) -> Tensor:
        """The temperature at which so many blocks lie within it of the threshold, as a share of those the budget keeps now."""
        kept = blocks.n * self._budget(blocks, progress) / max(blocks.total, 1)
        half = max(1, round(0.5 * SCHEDULES[self.schedule](progress, self.start, self.end) * kept))
        order = scores.sort(descending=True).values
        high, low = max(0, round(kept) - 1 - half), min(blocks.n - 1, round(kept) - 1 + half)
        return ((order[high] - order[low]).double() / 2).clamp(min=ROUNDING * unit)

    def mask(self, blocks: Blocks, state: State, seed: int | None = None) -> Tensor:
        scores = state["scores"]
        if self.clip is not None:
            scores = _clipped(scores, self.clip)
        if self.follow:
            scores = scores + state["moved"]
        if self.mask_type == "binary":
            out: Tensor = _hard(blocks, state, scores).to(torch.float32) + (scores - scores.detach())
            return out
        soft = soft_topk(scores, state["limit"], state["tau"], blocks.soft_cost, warm=state["theta"])
        if self.mask_type == "binary_soft":
            return soft + (_hard(blocks, state, scores).to(soft.dtype) - soft).detach()
        if self.mask_type == "stochastic" and seed is not None:
            generator = torch.Generator(soft.device).manual_seed(seed)
            sample = torch.bernoulli(soft.detach(), generator=generator)
            return soft + (sample - soft).detach()
        return soft

    def amplify(self, blocks: Blocks, mask: Tensor) -> Tensor:
        if not self.gain:
            return mask
        paid = mask if blocks.soft_cost is None else mask * blocks.soft_cost
        return mask * (paid.sum() / (paid * mask).sum().clamp(min=1e-30))  # a sample can be empty

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        out: State = {"theta": state["theta"][1:].expand(2, 2)}
        scores = state["scores"].detach()
        refresh = clock.enters(min(REFRESHES, clock.steps)) is not None
        if self.follow and refresh:
            out["moved"] = self.measure(blocks) - state["began"]
        if self._limit is not None:
            grown = min(1.0, clock.progress / self.warmup) if self.warmup else 1.0
            most = self._limit * grown * state["tau"].to(scores.dtype) * (100 / clock.steps)
            scores = out["scores"] = out["before"] = state["before"] + torch.clamp(scores - state["before"], -most, most)
        if self.unit == "band" and refresh:
            moved = out.get("moved", state["moved"]) if self.follow else 0.0
            out["tau"] = self._band(blocks, scores + moved, state["unit"], clock.progress)
        return Change(out)

    @torch.no_grad()
    def warmth(self, blocks: Blocks, state: State) -> float:
        """How far the soft mask is from a hard one because of its temperature, as a share of the kept blocks.

        Not counted: what a thousand times colder mask still has, tied scores and the last block of a budget in costs; and the
        two blocks that are decided least, since two that happen to be nearly equal say nothing about all others.
        """
        if self.schedule == "fixed" or self.mask_type.startswith("binary"):
            return 0.0
        scores = self.rank(blocks, state)
        soft, cold = (soft_topk(scores, state["limit"], state["tau"] * factor, blocks.soft_cost) for factor in (1.0, 1e-3))
        undecided = torch.minimum(soft, 1 - soft) - torch.minimum(cold, 1 - cold)
        keep = blocks.n * blocks.limit / max(blocks.total, 1)
        return float((undecided.sum() - undecided.topk(min(2, blocks.n)).values.sum()) / (2 * max(keep, 1.0)))

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        scores: Tensor = state["scores"].detach()
        return scores + state["moved"] if self.follow else scores


def _hard(blocks: Blocks, state: State, scores: Tensor) -> Tensor:
    limit = state["limit"].item()
    k = math.ceil(limit) if blocks.cost is None else limit
    return hard_topk(scores.detach(), k, blocks.cost)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, most: float) -> Tensor:
        ctx.most = most
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.most / grad.norm().clamp(min=1e-30)).clamp(max=1.0), None


def _clipped(scores: Tensor, most: float) -> Tensor:
    """The same scores, whose gradient is scaled down to norm ``most`` where it is larger."""
    out: Tensor = _Clip.apply(scores, most)  # type: ignore[no-untyped-call]
    return out
