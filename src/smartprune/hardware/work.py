"""The cost of one layer on an NPU: dense, with blocks skipped, and as a linear approximation.

``docs/npu.md`` explains every formula of this file. All numbers are integers or exact fractions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.block import Grid
from ..core.usage import Call

if TYPE_CHECKING:
    from .npu import NPU


@dataclass(frozen=True)
class Cost:
    """The cost of a layer in cycles, and in bytes where the name says so. ``latency`` is the result; the others explain it."""

    mac: int  # all multiplications, with free memory and even lanes
    busy: int  # all lanes together, including fill and drain
    compute: int  # the lane that finishes last
    weight_bytes: int
    activation_bytes: int
    weight_cycles: int  # to move the weights
    activation_cycles: int  # to move the input and the output
    latency: int

    @property
    def waits_for(self) -> str:
        """What determines the latency."""
        parts = {"compute": self.compute, "weights": self.weight_cycles, "activations": self.activation_cycles}
        return max(parts, key=lambda name: parts[name])

    @staticmethod
    def sum(costs: Sequence[Cost]) -> Cost:
        """The cost of running one after the other."""
        names = Cost.__dataclass_fields__
        return Cost(**{name: sum(getattr(cost, name) for cost in costs) for name in names})

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "waits_for": self.waits_for}


@dataclass(frozen=True)
class Work:
    """A layer's blocks in the order (part, output, input, kernel), whatever the order of its weight's axes."""

    grid: Grid
    transposed: bool

    @property
    def parts(self) -> int:
        return self.grid.axes[0].parts

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor, Tensor]:
        first, second = (torch.tensor(axis.lengths()[: axis.per_part], device="cpu") for axis in self.grid.axes[:2])
        kernel = torch.ones(1, dtype=torch.int64, device="cpu")
        for axis in self.grid.axes[2:]:
            kernel = (kernel[:, None] * torch.tensor(axis.lengths(), device="cpu")).reshape(-1)
        return (second, first, kernel) if self.transposed else (first, second, kernel)

    @property
    def outs(self) -> Tensor:
        """Output channels of every step along that axis, within a part."""
        return self._lengths[0]

    @property
    def ins(self) -> Tensor:
        return self._lengths[1]

    @property
    def kernel(self) -> Tensor:
        """Kernel positions of every block along those axes."""
        return self._lengths[2]

    @property
    def elements(self) -> Tensor:
        """Real elements of every block, [output, input, kernel]."""
        return self.outs[:, None, None] * self.ins[:, None] * self.kernel

    def ordered(self, values: Tensor) -> Tensor:
        """A value per block, [n], as [part, output, input, kernel]."""
        out = values.reshape(self.parts, self.grid.axes[0].per_part, self.grid.shape[1], -1)
        return out.transpose(1, 2) if self.transposed else out

    def flat(self, values: Tensor) -> Tensor:
        """The inverse of :meth:`ordered`."""
        return (values.transpose(1, 2) if self.transposed else values).reshape(-1)


@dataclass(frozen=True)
class Order:
    """What is fetched repeatedly if the input does not fit on chip: the weights ``passes`` times, or the ``inputs`` for every group
    of output rows that runs at the same time."""

    passes: int = 1
    inputs: bool = False


def dense(npu: NPU, work: Work, call: Sequence[Call]) -> Cost:
    """One call of the layer with every block, in tiles of the array's shape."""
    return min(_dense(npu, work, call), key=_by_latency)[0]


def pruned(npu: NPU, work: Work, call: Sequence[Call], live: Tensor) -> Cost:
    """One call with the ``live`` blocks only, bool [n], one by one; dense where that is quicker."""
    return min([*_skipping(npu, work, call, work.ordered(live)), *_dense(npu, work, call)], key=_by_latency)[0]


def line(npu: NPU, work: Work, call: Sequence[Call], share: Fraction) -> tuple[int, Tensor]:
    """A constant and a cost per block, int64 [n]. Their sum over kept blocks approximates the latency.

    Latency is not a sum over blocks. This is its tangent near the latency that is left after removing ``share`` of it, assuming
    that lanes stay as even as in the dense layer. That is accurate enough for a search. It does not account for kept blocks that
    gather in the rows of one lane.
    """
    around = npu.tail + _lead(npu, work, call)
    top = dense(npu, work, call).latency - around  # no mask takes longer, because the layer can run dense
    every = torch.ones(work.grid.n, dtype=torch.bool, device="cpu")
    most_moved, order = min(_skipping(npu, work, call, work.ordered(every)), key=_by_latency)
    fixed = Fraction(min(most_moved.activation_cycles, top))  # assumed to be moved for every mask
    target = (1 - share) * top
    cycles = _block_cycles(npu, work, call, order.passes)
    rows = cycles.sum((2, 3)).reshape(-1).tolist()
    unevenness = Fraction(_makespan(rows, npu.lanes), sum(rows))
    corners = (Fraction(0), min(top / unevenness, sum(rows)), Fraction(sum(rows)))
    base, slope = _tangent([(x, max(fixed, min(x * unevenness, Fraction(top)))) for x in corners], target)
    cost = _scale_up(cycles, slope)
    per_cycle = npu.weight_bits_per_cycle
    if per_cycle is not None:
        bits = ((npu.weight_bits * work.elements + 8 * npu.index_bytes) * order.passes).expand(cycles.shape)
        longest = int(bits.sum()) / per_cycle
        points = [(x, max(fixed, min(x, Fraction(top)))) for x in (Fraction(0), min(Fraction(top), longest), longest)]
        base2, slope = _tangent(points, target)
        base, cost = max(base, base2), torch.maximum(cost, _scale_up(bits, slope / per_cycle))
    return math.ceil(base) + around, work.flat(cost)


def _by_latency(option: tuple[Cost, Order]) -> tuple[int, int]:
    return option[0].latency, option[0].weight_bytes + option[0].activation_bytes


def _dense(npu: NPU, work: Work, call: Sequence[Call]) -> Iterator[tuple[Cost, Order]]:
    outs, ins, kernel = (int(lengths.sum()) for lengths in (work.outs, work.ins, work.kernel))
    rows, tiles = _ceil_div(outs, npu.rows), _ceil_div(ins, npu.columns) * kernel
    uses, reads, writes = _per_part(work, call)
    weights = npu.weight_bits * outs * ins * kernel * work.parts
    written = npu.activation_bits * outs * sum(writes)
    read = npu.activation_bits * ins * sum(reads)
    lead = _lead(npu, work, call)
    for order in _orders(npu, read):
        turns = _ceil_div(rows, npu.lanes) if order.inputs else 1
        loads = [tiles * (n + npu.fold * order.passes) for n in uses for _ in range(rows)]
        mac = rows * tiles * sum(uses)
        yield _cost(npu, lead, mac, loads, weights * order.passes, read * turns + written), order


def _skipping(npu: NPU, work: Work, call: Sequence[Call], live: Tensor) -> Iterator[tuple[Cost, Order]]:
    _, reads, writes = _per_part(work, call)
    weights = npu.weight_bits * int((live * work.elements).sum()) + 8 * npu.index_bytes * int(live.sum())
    written = npu.activation_bits * int(work.outs.sum()) * sum(writes)
    feeding = live.any(3)  # [part, output, input]: whether these outputs need these inputs
    read = _input_bits(npu, work, feeding.any(1), reads)
    mac = int((live * _block_cycles(npu, work, call, 0)).sum())
    lead = _lead(npu, work, call) if mac else 0
    for order in _orders(npu, read):
        loads = (live * _block_cycles(npu, work, call, order.passes)).sum((2, 3)).reshape(-1).tolist()
        fetched = read
        if order.inputs:  # rows that run at the same time share fetched inputs
            turns = [part.split(npu.lanes) for part in feeding]
            times = [int(t.max()) for t in _ceil_divs(work.outs, npu.rows).split(npu.lanes)]
            fed = [torch.stack([n * t.any(0).long() for n, t in zip(times, ts, strict=True)]) for ts in turns]
            fetched = _input_bits(npu, work, torch.stack(fed), reads)
        yield _cost(npu, lead, mac, loads, weights * order.passes, fetched + written), order


def _cost(npu: NPU, lead: int, mac: int, loads: Sequence[int], weight_bits: int, activation_bits: int) -> Cost:
    compute = _makespan(loads, npu.lanes)
    weight_cycles = _transfer_cycles(weight_bits, npu.weight_bits_per_cycle)
    activation_cycles = _transfer_cycles(activation_bits, npu.activation_bits_per_cycle)
    return Cost(
        mac=_ceil_div(mac, npu.lanes),
        busy=sum(loads),
        compute=compute,
        weight_bytes=_ceil_div(weight_bits, 8),
        activation_bytes=_ceil_div(activation_bits, 8),
        weight_cycles=weight_cycles,
        activation_cycles=activation_cycles,
        latency=max(compute, weight_cycles, activation_cycles) + lead + npu.tail,
    )


def _lead(npu: NPU, work: Work, call: Sequence[Call]) -> int:
    """Cycles in which the weights of the first tile arrive before anything runs, or the last tile runs after everything arrived."""
    tile = min(npu.rows, int(work.outs.sum())) * min(npu.columns, int(work.ins.sum()))
    return min(call[0].uses + npu.fold, _transfer_cycles(npu.weight_bits * tile, npu.weight_bits_per_cycle))


def _orders(npu: NPU, input_bits: int) -> list[Order]:
    pieces = _ceil_div(input_bits, 8 * npu.buffer_bytes)
    return [Order()] if pieces <= 1 else [Order(inputs=True), Order(passes=pieces)]


def _per_part(work: Work, call: Sequence[Call]) -> tuple[list[int], list[int], list[int]]:
    """Uses, reads and writes of every part. Groups share one call; query, key and value have a call each."""
    calls = list(call) * (work.parts // len(call))
    return [c.uses for c in calls], [c.reads for c in calls], [c.writes for c in calls]


def _block_cycles(npu: NPU, work: Work, call: Sequence[Call], passes: int) -> Tensor:
    """Cycles that each block keeps a lane busy, int64 [part, output, input, kernel]; passes=0 excludes fill and drain."""
    tiles = _ceil_divs(work.outs, npu.rows)[:, None, None] * _ceil_divs(work.ins, npu.columns)[:, None] * work.kernel
    per_tile = torch.tensor([n + npu.fold * passes for n in _per_part(work, call)[0]], device="cpu")
    return per_tile[:, None, None, None] * tiles


def _input_bits(npu: NPU, work: Work, fed: Tensor, reads: Sequence[int]) -> int:
    """Bits of the input channels that are needed, times how often: ``fed`` [part, ..., input]."""
    channels: list[int] = (fed * work.ins).reshape(work.parts, -1).sum(1).tolist()
    return npu.activation_bits * sum(n * count for n, count in zip(channels, reads, strict=True))


def _makespan(loads: Sequence[int], lanes: int) -> int:
    """When the last lane finishes, if every row goes to the first free lane."""
    ends = [0] * lanes
    for load in loads:
        heapq.heapreplace(ends, ends[0] + load)
    return max(ends)


def _transfer_cycles(bits: int, per_cycle: Fraction | None) -> int:
    return 0 if per_cycle is None else math.ceil(bits / per_cycle)


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _ceil_divs(counts: Tensor, size: int) -> Tensor:
    return -(-counts // size)


def _scale_up(values: Tensor, factor: Fraction) -> Tensor:
    """``ceil(values * factor)`` in exact arithmetic. There are few distinct values."""
    distinct, index = values.unique(return_inverse=True)
    return torch.tensor([math.ceil(value * factor) for value in distinct.tolist()], device="cpu")[index]


def _tangent(points: Sequence[tuple[Fraction, Fraction]], target: Fraction) -> tuple[Fraction, Fraction]:
    """Constant and slope of the upper hull of rising ``points`` where it reaches ``target``. No point lies above that line."""
    hull: list[tuple[Fraction, Fraction]] = []
    for x, y in sorted(set(points)):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    base, slope = hull[-1][1], Fraction(0)
    for left, right in pairwise(hull):
        slope = _slope(left, right)
        base = left[1] - slope * left[0]
        if right[1] >= target:
            break
    return base, slope


def _slope(a: tuple[Fraction, Fraction], b: tuple[Fraction, Fraction]) -> Fraction:
    return (b[1] - a[1]) / (b[0] - a[0])
