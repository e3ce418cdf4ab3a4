"""SMART: one learnable score per block, a differentiable top-k over all scores, and a temperature that falls.

``mask = sigmoid((scores - theta) / tau)``, with theta such that ``sum(cost * mask) = limit`` (paper, equations 2 and 5).
Scores start at the mean absolute weight of their blocks and train with the weights. At the end, the blocks with the highest
scores are kept.

Paper: two additions are on by default (docs/beyond.md has the measurements). Scores track the magnitude of their blocks
(``follow``), and the distance a score can move in a part of the search is limited (``reach``). ``Smart.paper()`` is the paper's
form. ``Smart(start=5, end=1e-3, follow=False, reach=None)`` is the same form, with temperatures in units of your model's weights.
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

REFRESHES = 200  # how many times per search the scores are updated with changes of the weights
ROUNDING = 1e-6  # of the mean score: a smaller spread comes from rounding, not from different weights
RAMP_START = 0.99  # share of the cost of all blocks; below 1, so scores have gradients from the first step on


@lists_settings
@dataclass(frozen=True)
class Smart:
    """SMART: a learned score per block, a differentiable top-k over all scores, and a temperature that falls.

    The defaults suit any model, because temperatures are in units of the model's own weights. Above a sparsity of 97 %, or in a
    long search of a small network, use ``ramp="cubic"`` or :class:`Gradual` with ``norm="balanced"``.

    Args:
        start: The temperature at the start of the search, in the unit that ``unit`` names.
        end: The temperature at its end.
        unit: ``"spread"``: the standard deviation of the initial scores. ``"absolute"``: as the paper prints temperatures.
            ``"band"``: ``start`` and ``end`` are numbers of blocks, as shares of the kept ones, and the temperature is such that
            this many scores lie within one temperature of the threshold.
        schedule: ``"geometric"``, ``"paper_exponential"``, ``"linear"``, ``"inverse_exponential"`` or ``"fixed"``.
        init: What the scores start from: ``"mean"`` of |w|, ``"l1"`` (its sum), ``"share"`` (the log of a block's share of its
            layer), ``"balanced"`` (between magnitude and share) or ``"ones"``.
        follow: Whether scores change by as much as that number changes while the weights train.
        reach: The largest distance that a score moves in a hundredth of the search, in temperatures. None sets no limit; scores
            then decide every block while the mask is still soft. A reach without ``follow`` is harmful, because scores stay
            near their start. It does not apply with ``init="ones"`` or ``train_weights=False``, where scores have nothing to
            follow.
        warmup: The first share of the search, in which the reach grows from zero to its full size. Use it for a network whose
            loss starts far above chance, such as one with the last layer of another task.
        ramp: How the budget is reached: ``"none"`` (it applies from the start) or ``"cubic"`` (from nearly all blocks down to the
            budget, while the temperature falls).
        hold: With a ramp, the last share of the search, in which the budget is reached and blocks only change places.
        gain: Whether weights are multiplied by ``mask * sum(mask) / sum(mask ** 2)`` instead of the mask, with both sums
            weighted by cost. The search then starts with the dense network. Use it for networks without batch norm. Gain
            without ``follow`` and ``reach`` is harmful.
        mask_type: ``"deterministic"``, ``"stochastic"`` (Bernoulli samples of the mask), ``"binary"`` (a hard mask in the forward
            pass, straight-through gradients to scores and weights) or ``"binary_soft"`` (a hard mask, gradients of the soft one).
        train_weights: Whether the pruned weights train during the search.
        clip: The largest norm of the scores' gradient in one backward pass. Gradients of several passes add up as usual.

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Smart(ramp="cubic").start
        2.0
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
        """The form of the paper's Table 4: absolute temperatures, and scores that only their gradients move.

        The schedule is the one that the paper prints if it exists for these temperatures, and geometric otherwise.

        Args:
            start: The temperature at the start of the search.
            end: The temperature at its end.
            settings: Other settings of :class:`Smart`.

        Returns:
            The method.
        """
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
    def _effective_reach(self) -> float | None:
        """The reach, or None if scores have nothing to follow: limited scores would then end in ties, or stay undecided."""
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
        if self._effective_reach is None:
            no_reach = "a reach, and there is none with reach=None, init='ones' or train_weights=False; change these, or"
            if self.warmup:
                raise SmartpruneError(f"Smart: warmup={self.warmup:g} needs {no_reach} use warmup=0")
            if self.unit == "band":
                raise SmartpruneError(f"Smart: unit='band' needs {no_reach} use another unit")
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
        SCHEDULES[self.schedule](0.0, self.start, self.end)  # paper_exponential raises for temperatures it is not defined for

    def measure(self, blocks: Blocks) -> Tensor:
        """What the scores start from and follow, computed from the current weights, [n]."""
        if self.init == "ones":
            return torch.ones(blocks.n, device=blocks.device)
        if self.init == "share":
            return blocks.share()
        if self.init == "balanced":
            return balanced_rank(blocks)
        return blocks.sum(torch.abs) if self.init == "l1" else blocks.mean(torch.abs)

    def state(self, blocks: Blocks) -> State:
        scores = self.measure(blocks)
        magnitudes = (blocks.mean(torch.abs) if self.init == "ones" else scores).double()
        spread = float(magnitudes.std(correction=0))
        spread = spread if spread > ROUNDING * float(magnitudes.abs().mean()) else 0.0  # equal weights, full and partial blocks
        unit = 1.0 if self.unit == "absolute" else spread or float(scores.double().abs().mean()) or 1.0
        # (pivot, delta) of theta: row 0 is where the solver starts, row 1 is its last solution. With two rows, every forward pass
        # between two steps starts at the same point and returns the same bits.
        theta = torch.full((2, 2), math.nan, dtype=torch.float64, device=blocks.device)
        out: State = {"scores": scores.clone().requires_grad_(), "unit": unit, "theta": theta}
        if self.follow:
            out |= {"began": scores, "moved": torch.zeros_like(scores)}
        if self._effective_reach is not None:
            out["before"] = scores.clone()
        if self.unit == "band":
            out["tau"] = self._band(blocks, scores, unit, 0.0)
        return out

    def with_order(self, state: State, order: Tensor) -> State:
        if self.init == "ones":
            raise SmartpruneError(
                "Smart: init='ones' makes all scores equal, so they cannot follow start; use init='mean', or no start"
            )
        scores = _in_order_of(state["scores"].detach(), order)
        out = {**state, "scores": scores.clone().requires_grad_()}
        return out | ({"before": scores.clone()} if "before" in state else {})

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        limit = self._limit(blocks, progress)
        if self.unit == "band":  # the temperature is a tensor that depends on the scores, see `update`
            return {"limit": limit}
        return {"tau": self._temperature(progress) * state["unit"], "limit": limit}

    def _temperature(self, progress: float) -> float:
        return SCHEDULES[self.schedule](progress, self.start, self.end)

    def _limit(self, blocks: Blocks, progress: float) -> float:
        """The cost that the mask may have now."""
        limit = float(blocks.limit)
        if self.ramp == "cubic":
            limit = cubic(min(1.0, progress / (1 - self.hold)), max(limit, RAMP_START * blocks.total), limit)
        return limit

    def _band(self, blocks: Blocks, scores: Tensor, unit: float, progress: float) -> Tensor:
        """Half the distance between two scores: one ranks above the threshold, one below, by half the width of the band."""
        kept = blocks.n * self._limit(blocks, progress) / max(blocks.total, 1)
        half = max(1, round(0.5 * self._temperature(progress) * kept))
        ordered = scores.sort(descending=True).values
        threshold = round(kept) - 1
        high, low = max(0, threshold - half), min(blocks.n - 1, threshold + half)
        return ((ordered[high] - ordered[low]).double() / 2).clamp(min=ROUNDING * unit)

    def mask(self, blocks: Blocks, state: State, seed: int | None = None) -> Tensor:
        scores = state["scores"]
        if self.clip is not None:
            scores = _clip_gradient(scores, self.clip)
        if self.follow:
            scores = scores + state["moved"]
        if self.mask_type == "binary":
            out: Tensor = _hard_mask(blocks, state, scores).to(torch.float32) + (scores - scores.detach())
            return out
        soft = soft_topk(scores, state["limit"], state["tau"], blocks.soft_cost, warm=state["theta"])
        if self.mask_type == "binary_soft":
            return soft + (_hard_mask(blocks, state, scores).to(soft.dtype) - soft).detach()
        if self.mask_type == "stochastic" and seed is not None:
            generator = torch.Generator(soft.device).manual_seed(seed)
            sample = torch.bernoulli(soft.detach(), generator=generator)
            return soft + (sample - soft).detach()
        return soft

    def amplify(self, blocks: Blocks, mask: Tensor) -> Tensor:
        if not self.gain:
            return mask
        cost = mask if blocks.soft_cost is None else mask * blocks.soft_cost
        return mask * (cost.sum() / (cost * mask).sum().clamp(min=1e-30))  # clamped, since a stochastic mask can be empty

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        out: State = {"theta": state["theta"][1:].expand(2, 2)}
        scores = state["scores"].detach()
        is_refresh = clock.enters(min(REFRESHES, clock.steps)) is not None
        if self.follow and is_refresh:
            out["moved"] = self.measure(blocks) - state["began"]
        reach = self._effective_reach
        if reach is not None:
            growth = min(1.0, clock.progress / self.warmup) if self.warmup else 1.0
            limit = reach * growth * state["tau"].to(scores.dtype) * (100 / clock.steps)
            scores = out["scores"] = out["before"] = state["before"] + torch.clamp(scores - state["before"], -limit, limit)
        if self.unit == "band" and is_refresh:
            moved = out.get("moved", state["moved"]) if self.follow else 0.0
            out["tau"] = self._band(blocks, scores + moved, state["unit"], clock.progress)
        return Change(out)

    @torch.no_grad()
    def warmth(self, blocks: Blocks, state: State) -> float:
        """How far the soft mask is from a hard one because of its temperature, as a share of the kept blocks.

        Not counted are the differences that remain at a thousandth of the temperature (tied scores, the last block of a budget in
        costs), and the two least decided blocks: two scores that happen to be nearly equal say nothing about the others.
        """
        if self.schedule == "fixed" or self.mask_type.startswith("binary"):
            return 0.0
        scores = self.rank(blocks, state)
        soft, cold = (soft_topk(scores, state["limit"], state["tau"] * factor, blocks.soft_cost) for factor in (1.0, 1e-3))
        undecided = torch.minimum(soft, 1 - soft) - torch.minimum(cold, 1 - cold)
        kept = blocks.n * blocks.limit / max(blocks.total, 1)
        return float((undecided.sum() - undecided.topk(min(2, blocks.n)).values.sum()) / (2 * max(kept, 1.0)))

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        scores: Tensor = state["scores"].detach()
        return scores + state["moved"] if self.follow else scores


def _in_order_of(values: Tensor, order: Tensor) -> Tensor:
    """The values, sorted as the entries of ``order`` are. Where these are equal, as the values were.

    >>> _in_order_of(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5, 7, 5]))
    tensor([1., 3., 2.])
    """
    by_value = values.argsort(stable=True)
    ranked = by_value[order[by_value].argsort(stable=True)]
    out = torch.empty_like(values)
    out[ranked] = values[by_value]
    return out


def _hard_mask(blocks: Blocks, state: State, scores: Tensor) -> Tensor:
    limit = state["limit"].item()
    k = math.ceil(limit) if blocks.cost is None else limit
    return hard_topk(scores.detach(), k, blocks.cost)


class _ClipGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, norm: float) -> Tensor:
        ctx.norm = norm
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.norm / grad.norm().clamp(min=1e-30)).clamp(max=1.0), None


def _clip_gradient(scores: Tensor, norm: float) -> Tensor:
    """The same scores. The norm of their gradient is at most ``norm``."""
    out: Tensor = _ClipGradient.apply(scores, norm)  # type: ignore[no-untyped-call]
    return out
