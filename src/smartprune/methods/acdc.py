"""AC/DC: compressed and dense phases alternate on the same weights (Peste et al. 2021, on blocks).

A compressed phase keeps the blocks with the largest L2 norm. When it ends, removed weights restart from zero and the optimizer's
momentum is reset. After the last dense phase the mask is chosen once more and stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..topk import hard_topk
from .cap import capped_floor, check_cap
from .method import Change, Clock, State, count, lists_settings


@lists_settings
@dataclass(frozen=True)
class Acdc:
    """AC/DC: compressed and dense phases alternate on the same weights.

    Args:
        cycles: The number of pairs of a compressed and a dense phase, all of equal length.
        mspl: The largest share of its blocks that a layer may lose.
        cap: What happens if ``mspl`` cannot be met: ``"strict"`` (attach raises), ``"relax"`` (layers keep fewer, but at least
            one block while that fits) or ``"off"``.

    Raises:
        SmartpruneError: A setting is unknown; ``attach`` raises for values that are out of range.

    Examples:
        >>> import smartprune as sp
        >>> sp.Acdc(cycles=4).mspl
        0.98
    """

    name: ClassVar[str] = "acdc"

    cycles: int = 8
    mspl: float = 0.98
    cap: str = "strict"

    def check(self, blocks: Blocks, steps: int) -> None:
        count("Acdc: cycles", self.cycles)
        if steps < 2 * self.cycles:
            raise SmartpruneError(
                f"Acdc: cycles={self.cycles} needs at least {2 * self.cycles} steps, but the search has {steps}; "
                "make the search longer, or use fewer cycles"
            )
        check_cap("Acdc", blocks, self.mspl, self.cap)

    def state(self, blocks: Blocks) -> State:
        return {"mask": self._compress(blocks)}

    def scalars(self, blocks: Blocks, state: State, progress: float) -> dict[str, float]:
        return {}

    def mask(self, blocks: Blocks, state: State, seed: int | None) -> Tensor:
        return state["mask"]  # type: ignore[no-any-return]

    def update(self, blocks: Blocks, state: State, clock: Clock) -> Change:
        phase = clock.enters(2 * self.cycles)
        if phase is None:
            return Change()
        if phase % 2 == 0:
            return Change({"mask": self._compress(blocks)})
        return Change({"mask": torch.ones_like(state["mask"])}, multiply=state["mask"].clone(), forget=True)

    def rank(self, blocks: Blocks, state: State) -> Tensor:
        """L2 norms. In a compressed phase kept blocks come first, since removed ones have their weights until the phase ends."""
        norms, mask = blocks.norms(), state["mask"]
        out: Tensor = norms + 2 * norms.max() * (mask.min() < 1) * mask
        return out

    def floor(self, blocks: Blocks) -> Tensor | None:
        return capped_floor(blocks, self.mspl, self.cap)

    def _compress(self, blocks: Blocks) -> Tensor:
        norms = blocks.norms()
        kept = hard_topk(norms, blocks.limit, blocks.cost, self.floor(blocks), blocks.layer.to(norms.device))
        return kept.to(torch.float32)
