"""A budget in time: the milliseconds of a network in the CPU runtime, as measured on this machine.

The time of a layer is not a sum over its blocks, so a search uses a cost per block, and the measured curves choose the hard mask.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.budget import InfeasibleBudgetError, ResolvedBudget, as_share
from ..core.hard import best_prefix, floor_blocks
from ..core.layers import Layer
from ..errors import SmartpruneError
from ..files import as_path, check_writable
from .latency_table import Curve, LatencyTable, measure_latency

MOST_THREADS = 256


@dataclass(frozen=True)
class NetworkTime:
    """The picoseconds of a network under a mask."""

    sizes: tuple[Tensor, ...]  # elements of every block, by layer
    curves: tuple[Curve, ...]
    network: Curve
    limit: int

    @property
    def total(self) -> int:
        return self.network.ps[-1]

    def of(self, mask: Tensor) -> int:
        """The time with the kept blocks ``mask``, bool [n]."""
        parts = mask.cpu().split([len(sizes) for sizes in self.sizes])
        layers = zip(self.curves, self.sizes, parts, strict=True)
        return self.network.at(sum(curve.at(int(sizes[part].sum())) for curve, sizes, part in layers))

    def best(self, rank: Tensor, floor: Tensor | None = None, layer: Tensor | None = None) -> Tensor | None:
        """The highest ranked blocks, as many as the limit allows; equal ranks go to the lower index.

        ``floor`` holds the fewest blocks of each layer: its highest ranked ones, or its smallest ones where those take too long.
        None if the smallest ones take too long as well.
        """
        forced = floor_blocks(rank, floor, layer)
        if floor is not None and self.of(forced) > self.limit:
            forced = self.cheapest(floor).to(rank.device)
        return best_prefix(self.of, self.limit, rank, forced)

    def cheapest(self, floor: Tensor) -> Tensor:
        """The ``floor`` smallest blocks of each layer, bool [n]."""
        masks = []
        for sizes, count in zip(self.sizes, floor.tolist(), strict=True):
            mask = torch.zeros(len(sizes), dtype=torch.bool, device="cpu")
            mask[sizes.sort(stable=True).indices[:count]] = True
            masks.append(mask)
        return torch.cat(masks)


@dataclass(frozen=True)
class LatencyBudget:
    """Made by :func:`latency`."""

    share: Fraction
    example: Any = field(repr=False)
    threads: int = 1
    table: LatencyTable | Path | None = field(default=None, repr=False)
    measured: dict[str, LatencyTable] = field(default_factory=dict, init=False, repr=False, compare=False)
    kind: ClassVar[str] = "latency"
    unit: ClassVar[str] = "ps"
    label: ClassVar[str] = "CPU time"
    of: ClassVar[str] = "model"

    @staticmethod
    def read_table(path: str | os.PathLike[str]) -> Path:
        """The file of a table: it is read when the budget is used, or written if it does not exist."""
        return as_path(path, "latency: table")

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        """A block costs the slope of the curve of its layer, near the share of blocks that fits the limit."""
        table = self._table(model, layers)
        curves = table.curves(layers)
        limit = math.floor((1 - self.share) * table.dense_ps)
        sizes = tuple(layer.grid.sizes().cpu() for layer in layers)
        exact = NetworkTime(sizes, tuple(curves), table.network, limit)
        least = table.network.ps[0]
        if limit < least:
            most = math.floor(10_000 * (1 - Fraction(least, table.dense_ps))) / 10_000
            raise InfeasibleBudgetError(
                f"latency({float(self.share):g}) cannot be met: the network takes {table.dense_ps / 1e9:.3g} ms on this machine, "
                f"and {least / 1e9:.3g} ms without any block of the layers to prune; at most {most:g} of the time can be removed; "
                "prune more layers (include=), or remove less"
            )
        start = sum(curve.ps[0] for curve in curves)
        allowed = _inverse(table.network, limit)
        cost = torch.cat(
            [_block_cost(curve, size, _fitting_share(curves, allowed)) for curve, size in zip(curves, sizes, strict=True)]
        )
        whole = int(cost.sum())
        fits = whole if self.share == 0 else min(whole, allowed - start)
        return ResolvedBudget(cost, fits, exact, table=self._describe(table, limit))

    def _table(self, model: nn.Module, layers: Sequence[Layer]) -> LatencyTable:
        if isinstance(self.table, LatencyTable):
            return self.table
        if self.table is not None and self.table.exists():
            return LatencyTable.load(self.table)
        key = repr([(layer.weight, layer.grid.weight_shape, layer.grid.shape) for layer in layers])
        if key not in self.measured:
            if self.example is None:
                raise SmartpruneError("latency: example is missing; give one input of the model, example=x")
            if self.table is not None:
                check_writable(self.table)
            self.measured[key] = measure_latency(model, layers, self.example, self.threads)
        if self.table is not None:
            self.measured[key].save(self.table)
        return self.measured[key]

    def _describe(self, table: LatencyTable, limit: int) -> dict[str, object]:
        return {
            "name": self.label,
            "unit": self.unit,
            "resolution": "1",
            "sha256": table.digest,
            "machine": table.machine,
            "threads": table.threads,
            "input": table.input,
            "dense_ms": table.dense_ps / 1e9,
            "promised_ms": limit / 1e9,
        }


def _inverse(curve: Curve, ps: int) -> int:
    """The largest ``x`` of a curve at which the time is at most ``ps``."""
    low, high = curve.x[0], curve.x[-1] + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if curve.at(middle) <= ps else (low, middle)
    return low


def _fitting_share(curves: Sequence[Curve], allowed: int) -> Fraction:
    """The largest multiple of 1/1024 of the elements of every layer that takes at most ``allowed`` picoseconds, at least one."""
    low, high = 0, 1025
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(curve.at(curve.x[-1] * middle // 1024) for curve in curves) <= allowed
        low, high = (middle, high) if fits else (low, middle)
    return Fraction(max(1, low), 1024)


def _block_cost(curve: Curve, sizes: Tensor, share: Fraction) -> Tensor:
    """What each block of a layer adds to its time if this share of the layer is kept, int64 [n]."""
    elements = max(1, math.floor(share * curve.x[-1]))
    return sizes.long() * (curve.at(elements) - curve.ps[0]) // elements


def latency(
    share: float,
    *,
    example: Any,
    threads: int = 1,
    table: LatencyTable | str | os.PathLike[str] | None = None,
) -> LatencyBudget:
    """A budget in time: removes this share of the milliseconds that the dense model takes in :func:`accelerate` on this machine.

    The time is that of one call of the whole model on ``example``, in float32. When the budget is used, the runtime is timed for
    some seconds: every layer with several shares of its blocks, inside the whole network. A table of these times decides which
    masks fit. It is an estimate for other masks, and holds for this machine only. The receipt names the machine, the threads, and
    the milliseconds of the dense model and of the pruned one.

    Two measurements differ a little. To continue a search later or on another machine, give ``table=`` a file.

    Args:
        share: The share of the time to remove, in [0, 1).
        example: One input of the model: a tensor, or a tuple or dictionary of arguments.
        threads: The number of threads of the runtime.
        table: A file (``.json``). If it exists, its times are used and nothing is measured. If not, it is written.

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1), or ``threads`` is not a number from 1 to 256. When the budget is used: the
            runtime cannot run the model, the table belongs to another model, or so much time cannot be removed.

    Examples:
        >>> import smartprune as sp
        >>> budget = sp.latency(0.5, example=torch.zeros(1, 3, 224, 224), table="latency.json")
        >>> float(budget.share), budget.threads, budget.unit
        (0.5, 1, 'ps')
    """
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise SmartpruneError(f"latency: threads={threads!r} is not a number from 1 to {MOST_THREADS}")
    stored = table if table is None or isinstance(table, LatencyTable) else LatencyBudget.read_table(table)
    return LatencyBudget(as_share(share, "latency"), example, threads, stored)
