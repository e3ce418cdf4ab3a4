"""AWG: accumulated weight and gradient (the paper's Appendix F, on blocks).

Each of S stages begins with a calibration, in which no parameter moves. The importance of a block is a running mean of the sum of
``|gradient * weight|`` over its elements, times the inverse of the share of its layer that is left. Then the least important blocks
are removed and the rest trains on. A removed block has no gradient, so masks are nested. The exceptions are blocks that use up the
rest of a budget in costs, and blocks of a floor that cannot be paid for without them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..topk import hard_topk
from .cap import capped_floor, check_cap, least_cost
from .method import Change, Clock, State, count, lists_settings, within


@lists_settings
@dataclass(frozen=True)
class Awg:
    """AWG: prunes in stages by the accumulated product of weight and gradient.

    Paper: its factor for sparse layers is 1 for binary masks. The prose describes blocks over surviving blocks, which is used
    here. Number and length of the stages are not given; the defaults are eight stages of one part calibration and four parts
    training.

    Args:
        stages: The number of stages.
        calibration: The share of each stage in which gradients are observed and no parameter moves.
        gamma: The decay of the running mean.
        mspl: The largest share of its blocks that a layer may lose.
        cap: What happens if ``mspl`` cannot be met: ``"strict"`` (attach raises), ``"relax"`` (layers keep fewer, but at least
            one block while that fits) or ``"off"``.

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Awg(cap="relax").stages
        8
    """

    name: ClassVar[str] = "awg"
    needs_float64: ClassVar[bool] = False
    needs_whole_weights: ClassVar[bool] = True

    stages: int = 8
    calibration: float = 0.2
    gamma: float = 0.99
    mspl: float = 0.98
    cap: str = "strict"

    def check(self, blocks: Blocks, steps: int) -> None:
        count("Awg: stages", self.stages)
        if steps < 2 * self.stages:
            raise SmartpruneError(
                f"Awg: stages={self.stages} needs at least {2 * self.stages} steps, but the search has {steps}; make the search "
                "longer, or use fewer stages"
            )
        within("Awg: calibration", self.calibration, 1e-6, 1)
        within("Awg: gamma", self.gamma, 0, 1 - 1e-9)
        check_cap("Awg", blocks, self.mspl, self.cap)

    def state(self, blocks: Blocks) -> State:
        n, device = blocks.n, blocks.device
        return {
            "mask": torch.ones(n, device=device),
            "importance": torch.full((n,), math.nan, device=device),  # NaN: nothing observed in this stage yet
        }

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        return state["mask"]  # type: ignore[no-any-return]

    def calibrates(self, clock: Clock) -> bool:
        """The first steps of every stage, at least one."""
        length, done = self._position(clock)
        return clock.count < clock.steps and done < max(1, round(self.calibration * length))

    def _position(self, clock: Clock) -> tuple[int, int]:
        """The length of the stage of the next step, and the number of its steps that are done."""
        stage = clock.count * self.stages // clock.steps
        first, last = (-(-s * clock.steps // self.stages) for s in (stage, stage + 1))
        return last - first, clock.count - first

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        before = Clock(clock.count - 1, clock.steps)
        if not self.calibrates(before):
            return Change()
        density = blocks.per_layer(state["mask"]).clamp(min=1)
        layer, counts = blocks.layer.to(density.device), blocks.counts.to(density.device)
        observed = state["watched"] * (counts / density)[layer]
        old = state["importance"]
        mean = torch.where(old.isnan(), observed, self.gamma * old + (1 - self.gamma) * observed)
        mean = torch.where(observed.isfinite().all(), mean, old)  # a step that a gradient scaler skipped has no information
        if self.calibrates(clock) and self._position(clock)[1] > 0:
            return Change({"importance": mean})
        stage = before.count * self.stages // clock.steps + 1
        limit = blocks.total - (blocks.total - blocks.limit) * stage // self.stages
        alive = state["mask"] > 0
        cost, floor = blocks.cost, self.floor(blocks)
        if cost is not None:  # removed blocks stay removed, unless a floor cannot be paid for without them
            nested = torch.where(alive, cost, blocks.total + 1)
            cost = nested if floor is None or least_cost(blocks, floor, nested) <= limit else cost
        known = torch.where(mean.isnan(), blocks.mean(torch.abs), mean)  # by size if all steps were skipped
        kept = hard_topk(torch.where(alive, known, -1.0), limit, cost, floor, layer)
        return Change({"mask": kept.to(torch.float32), "importance": torch.full_like(mean, math.nan)})

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        """Kept blocks before removed ones, ordered by importance if that is known, else by mean absolute weight."""
        size, known = blocks.mean(torch.abs), state["importance"]
        inner = torch.where(known.isnan(), size / size.max().clamp(min=1e-30), known / known.nan_to_num().max().clamp(min=1e-30))
        out: Tensor = 2 * state["mask"] + inner
        return out

    def floor(self, blocks: Blocks) -> Tensor | None:
        return capped_floor(blocks, self.mspl, self.cap)
