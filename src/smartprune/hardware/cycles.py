"""The budget in NPU cycles.

The latency of a layer is not a sum over its blocks: it is the longest of three times, and it ends with the last lane. A search
needs a sum, so it uses a linear approximation (:func:`smartprune.hardware.work.line`). The latency itself chooses the hard mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.block import Block
from ..core.budget import InfeasibleBudgetError, ResolvedBudget, Scope, as_scope, as_share
from ..core.hard import best_prefix, floor_blocks
from ..core.layers import Layer, every_layer
from ..core.usage import Call, find_calls
from ..errors import SmartpruneError
from .npu import NPU
from .work import Work, dense, line, pruned

Calls = Sequence[Sequence[Call]]


@dataclass(frozen=True)
class Latency:
    """Cycles under a mask. ``limit`` of the ``total`` cycles may be used, and ``fixed`` of them do not depend on the mask."""

    npu: NPU
    layers: tuple[tuple[Work, Calls], ...]
    fixed: int
    total: int
    limit: int

    def of(self, mask: Tensor) -> int:
        """Cycles with the kept blocks ``mask``, bool [n]."""
        parts = mask.cpu().split([work.grid.n for work, _ in self.layers])
        cycles = (self._layer(work, calls, live) for (work, calls), live in zip(self.layers, parts, strict=True))
        return self.fixed + sum(cycles)

    def best(self, rank: Tensor, floor: Tensor | None = None, layer: Tensor | None = None) -> Tensor | None:
        """The highest ranked blocks, as many as the limit allows; equal ranks go to the lower index.

        ``floor`` holds the fewest blocks of each layer: its highest ranked ones, or its cheapest ones where those take too long.
        None if the cheapest ones take too long as well.
        """
        forced = floor_blocks(rank, floor, layer)
        if floor is not None and self.of(forced) > self.limit:
            forced = self.cheapest(floor).to(rank.device)
        return best_prefix(self.of, self.limit, rank, forced)

    def cheapest(self, floor: Tensor) -> Tensor:
        """A choice of ``floor`` blocks of each layer that takes few cycles, bool [n].

        Two arrangements are tried: as few rows of outputs as possible, and one block of every row in turn, which keeps all lanes
        busy. Each starts at the first block and at the last one, because partial blocks come last.
        """
        masks = []
        for (work, calls), count in zip(self.layers, floor.tolist(), strict=True):
            options = [(order < count).reshape(-1) for order in _orders(work)]
            options += [(order >= work.grid.n - count).reshape(-1) for order in _orders(work)]
            masks.append(min(options, key=lambda live: self._layer(work, calls, live)))
        return torch.cat(masks)

    def _layer(self, work: Work, calls: Calls, live: Tensor) -> int:
        return sum(pruned(self.npu, work, call, live).latency for call in calls)


def _orders(work: Work) -> tuple[Tensor, Tensor]:
    """Places of a layer's blocks in two orders: row by row of its outputs, and one of every row in turn."""
    others, axis = list(work.grid.shape), int(work.transposed)
    rows, places = others.pop(axis), torch.arange(work.grid.n, device="cpu")
    return places.view(rows, *others).movedim(0, axis), places.view(*others, rows).movedim(-1, axis)


@dataclass(frozen=True)
class CycleBudget:
    """Made by :func:`cycles`."""

    share: Fraction
    example: Any = field(repr=False)
    npu: NPU
    of: Scope = "layers"
    kind: ClassVar[str] = "cycles"
    unit: ClassVar[str] = "cycles"
    label: ClassVar[str] = "NPU cycles"

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        """A block costs the slope of a line near the latency of its layer. The cycles at which the lines start are
        subtracted from the limit."""
        counted = layers if self.of == "layers" else every_layer(model, Block(1, None, None))[0]
        calls = find_calls(model, [*layers, *counted], self.example)
        if not any(calls[layer.name] for layer in layers):
            raise SmartpruneError("cycles: the example reaches none of the layers to prune; give an input of the model")
        works = [Work(layer.grid, layer.transposed) for layer in layers]
        weights = {layer.weight for layer in layers}
        fixed = sum(self._dense(layer, calls[layer.name]) for layer in counted if layer.weight not in weights)
        total = fixed + sum(self._dense(layer, calls[layer.name]) for layer in layers)
        latency = Latency(
            npu=self.npu,
            layers=tuple((work, tuple(calls[layer.name])) for layer, work in zip(layers, works, strict=True)),
            fixed=fixed,
            total=total,
            limit=math.floor((1 - self.share) * total),
        )
        cost, start = self._linear(latency)
        whole = int(cost.sum())
        limit = whole if self.share == 0 else min(whole, latency.limit - start)
        if limit < 0 or whole == 0:
            raise InfeasibleBudgetError(self._infeasible(start, total))
        return ResolvedBudget(cost, limit, latency)

    def _dense(self, layer: Layer, calls: Calls) -> int:
        return sum(dense(self.npu, Work(layer.grid, layer.transposed), call).latency for call in calls)

    def _linear(self, latency: Latency) -> tuple[Tensor, int]:
        """A cost per block, int64 [n], and the cycles that are assumed not to depend on the blocks."""
        costs, start = [], latency.fixed
        for work, calls in latency.layers:
            cost = torch.zeros(work.grid.n, dtype=torch.int64, device="cpu")
            for call in calls:
                base, slopes = line(self.npu, work, call, self.share)
                start += base
                cost += slopes
            costs.append(cost)
        return torch.cat(costs), start

    def _infeasible(self, start: int, total: int) -> str:
        name = f"cycles({float(self.share):g}{', of=' + repr(self.of) if self.of == 'model' else ''})"
        unpruned = ", layers that are not pruned" if self.of == "model" else ""
        most = math.floor(10_000 * (1 - Fraction(start, total))) / 10_000
        return (
            f"{name} cannot be met: {start:,} of {total:,} cycles do not depend on the blocks (moved activations{unpruned}); "
            f"at most about {most:g} can be removed; remove less, prune more layers (include=), or raise activation_bandwidth"
        )


def cycles(share: float, example: Any, npu: NPU, of: Scope = "layers") -> CycleBudget:
    """A budget in NPU cycles: removes at least this share of the time that the layers take, and less than one block more.

    ``npu.estimate`` of the pruned model never exceeds the remaining time.

    Args:
        share: The share of the cycles to remove, in [0, 1).
        example: One input of the model: a tensor, or a tuple or dictionary of arguments. Cycles are counted for one sample.
        npu: The machine.
        of: ``"layers"``: the share is of the pruned layers. ``"model"``: it is of the whole model.

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1), or ``npu`` is not an :class:`NPU`.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Flatten(), nn.Linear(128, 4))
        >>> budget = sp.cycles(0.5, example=torch.zeros(1, 32, 2, 2), npu=sp.NPU.small())
        >>> limit, total = sp.plan(model, block=(8, 8), budget=budget).bound
        >>> limit == total // 2
        True
    """
    if not isinstance(npu, NPU):
        raise SmartpruneError(f"cycles: npu is a {type(npu).__name__}; give an NPU, such as smartprune.NPU(rows=16, columns=8)")
    return CycleBudget(as_share(share, "cycles"), example, npu, as_scope(of, "cycles"))
