"""The latency of all pruned layers under a mask, and the best mask within a latency.

Latency is no sum over blocks: a layer waits for the slowest of three things, and for its last lane. A search needs a sum, and
has one (``npu_work.line``); the hard mask that comes out of it is chosen by the latency itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.budget import Budget, as_share
from ..core.hard import floor_blocks
from ..core.usage import Call
from ..errors import SmartpruneError
from .work import Work, pruned

if TYPE_CHECKING:
    from .npu import NPU


@dataclass(frozen=True)
class Latency:
    """Cycles: ``goal`` may be used of ``dense``, of which ``rest`` does not depend on the mask."""

    npu: NPU
    layers: tuple[tuple[Work, tuple[Sequence[Call], ...]], ...]
    rest: int
    dense: int
    goal: int

    def of(self, mask: Tensor) -> int:
        """What the layers take with the kept blocks ``mask``, bool [n]."""
        parts = mask.cpu().split([work.grid.n for work, _ in self.layers])
        pairs = zip(self.layers, parts, strict=True)
        return self.rest + sum(pruned(self.npu, work, call, live).latency for (work, calls), live in pairs for call in calls)

    def best(self, rank: Tensor, floor: Tensor | None = None, layer: Tensor | None = None) -> Tensor | None:
        """The highest ranked blocks, as many as the goal allows; equal ranks go to the lower index. The next one in rank would
        exceed it. ``floor`` are the fewest blocks of each layer: the highest ranked, or those that take least where these take too
        long. None if they do too."""
        forced = floor_blocks(rank, floor, layer)
        if floor is not None and self.of(forced) > self.goal:
            forced = self.least(floor).to(rank.device)
        order = rank.masked_fill(forced, torch.inf).sort(descending=True, stable=True).indices
        low, high = int(forced.sum()), rank.numel() + 1  # so many fit, so many do not
        if self.of(forced) > self.goal:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            fits = middle <= rank.numel() and self.of(_first(order, middle)) <= self.goal
            low, high = (middle, high) if fits else (low, middle)
        return _first(order, low)

    def least(self, floor: Tensor) -> Tensor:
        """So many blocks of each layer where they take least, bool [n]: in as few rows as can be, or one of every row in turn,
        which keeps all lanes busy; from the first block on, or from the last, where those lie that are cut short."""
        out = []
        for (work, calls), count in zip(self.layers, floor.tolist(), strict=True):
            masks = [(order < count).reshape(-1) for order in _orders(work)]
            masks += [(order >= work.grid.n - count).reshape(-1) for order in _orders(work)]
            cycles = [sum(pruned(self.npu, work, call, live).latency for call in calls) for live in masks]
            out.append(masks[cycles.index(min(cycles))])
        return torch.cat(out)


def _orders(work: Work) -> tuple[Tensor, Tensor]:
    """Places of a layer's blocks in two orders: row by row of its outputs, and one of every row in turn."""
    others, axis = list(work.grid.shape), int(work.transposed)
    rows, places = others.pop(axis), torch.arange(work.grid.n, device="cpu")
    return places.view(rows, *others).movedim(0, axis), places.view(*others, rows).movedim(-1, axis)


def _first(order: Tensor, count: int) -> Tensor:
    mask = torch.zeros_like(order, dtype=torch.bool)
    mask[order[:count]] = True
    return mask


def cycles(share: float, example: Any, npu: NPU, of: Literal["layers", "model"] = "layers") -> Budget:
    """Removes at least this share of the time that the layers take on ``npu``, in its cycles, by less than one block more.

    ``npu.estimate`` of the pruned model never finds more than ``1 - share`` of the dense cycles of the layers that are
    pruned, or with ``of="model"`` of the whole model; with the next block in rank it would. ``example`` is one input of the
    model.
    """
    from .npu import NPU

    if not isinstance(npu, NPU):
        raise SmartpruneError(f"cycles: npu is a {type(npu).__name__}; give an NPU, such as smartprune.NPU(rows=16, columns=8)")
    if of not in ("layers", "model"):
        raise SmartpruneError(f"cycles: of={of!r}; it is 'layers' (those that are pruned) or 'model' (all of them)")
    return Budget("cycles", as_share(share, "cycles"), example, of, npu)
