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

from torch import nn

from ..core.budget import InfeasibleBudgetError, ResolvedBudget, as_share
from ..core.layers import Layer
from ..errors import SmartpruneError
from ..files import as_path, check_writable
from .latency_measure import measure_latency, show_input
from .latency_table import LatencyTable
from .latency_time import NetworkTime, block_costs, largest_sum

MOST_THREADS = 256


@dataclass(frozen=True)
class LatencyBudget:
    """Made by :func:`latency`."""

    share: Fraction
    example: Any = field(repr=False)
    threads: int | None = None  # those of the table, or one
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
        allowed = largest_sum(table.network, limit)
        cost = block_costs(curves, sizes, allowed)
        whole = int(cost.sum())
        fits = whole if self.share == 0 else min(whole, allowed - start)
        return ResolvedBudget(cost, fits, exact, table=self._describe(table, limit))

    def _table(self, model: nn.Module, layers: Sequence[Layer]) -> LatencyTable:
        if isinstance(self.table, LatencyTable):
            return self._checked(self.table)
        if self.table is not None and os.path.lexists(self.table):
            return self._checked(LatencyTable.load(self.table))
        key = repr([(layer.weight, layer.grid.weight_shape, layer.grid.shape) for layer in layers])
        if key not in self.measured:
            if self.example is None:
                raise SmartpruneError("latency: example is missing; give one input of the model, example=x")
            if self.table is not None:
                check_writable(self.table)
            self.measured[key] = measure_latency(model, layers, self.example, self.threads or 1)
        if self.table is not None:
            self.measured[key].save(self.table)
        return self.measured[key]

    def _checked(self, table: LatencyTable) -> LatencyTable:
        """A given table, if it was measured with the threads and the input of this budget."""
        if self.threads not in (None, table.threads):
            raise SmartpruneError(
                f"latency: the table was measured with threads={table.threads}, and threads={self.threads} is given; give "
                f"threads={table.threads}, or another file"
            )
        if self.example is not None and table.input != (shown := show_input(self.example)):
            raise SmartpruneError(
                f"latency: the table was measured with an input of {table.input}, and the example is {shown}; give such an "
                "example, or another file"
            )
        return table

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
            "promise": f"a call takes about {100 * float(1 - self.share):g}% of the dense model's time, with both timed in turns",
        }


def latency(
    share: float,
    *,
    example: Any,
    threads: int = 1,
    table: LatencyTable | str | os.PathLike[str] | None = None,
) -> LatencyBudget:
    """A budget in time: removes this share of the time that the dense model takes in :func:`accelerate` on this machine.

    The time is that of one call of the whole model on ``example``, in float32. When the budget is used, the runtime is timed for
    tens of seconds: every layer with several shares of its blocks, inside the whole network, and then the network with masks as
    budgets choose them, in turns with the dense model. A table of these times decides which masks fit.

    The promise is a share of the dense model's time, if both are timed in turns. The plan and the receipt also name the
    milliseconds of both, the machine and the threads; a machine that is slower an hour later is slower for both models. The
    promise holds for this machine, and is an estimate for every mask that was not timed.

    Two measurements differ by some percent. To continue a search later or on another machine, give ``table=`` a file.

    Args:
        share: The share of the time to remove, in [0, 1).
        example: One input of the model: a tensor, or a tuple or dictionary of arguments.
        threads: The number of threads of the runtime.
        table: A file (``.json``). If it exists, its times are used and nothing is measured; the model, its blocks, ``example`` and
            ``threads`` must be those that were measured. If not, it is written.

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1), or ``threads`` is not a number from 1 to 256. When the budget is used: the
            runtime cannot run the model, the table belongs to another model, input or number of threads, or so much time cannot be
            removed.

    Examples:
        >>> import torch
        >>> import smartprune as sp
        >>> budget = sp.latency(0.5, example=torch.zeros(1, 3, 224, 224), table="latency.json")
        >>> float(budget.share), budget.threads, budget.unit
        (0.5, 1, 'ps')
    """
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise SmartpruneError(f"latency: threads={threads!r} is not a number from 1 to {MOST_THREADS}")
    stored = table if table is None or isinstance(table, LatencyTable) else LatencyBudget.read_table(table)
    return LatencyBudget(as_share(share, "latency"), example, threads, stored)
