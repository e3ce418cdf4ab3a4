"""Estimates: the cycles of every layer of a model on an NPU, dense and with zero blocks skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from .. import text
from ..artifacts.counts import Count
from ..artifacts.source import Model, Source, check_not_masked, read_source
from ..core.block import Block
from ..core.budget import as_share
from ..core.layers import Layer, Skipped, candidates, every_layer
from ..core.occupancy import occupied
from ..core.transforms import zeros_survive
from ..core.usage import Call, find_calls
from ..errors import SmartpruneError
from .npu import NPU
from .work import Cost, Work, dense, pruned

WIDTH = 80


def estimate(
    npu: NPU,
    model: nn.Module,
    example: Any,
    block: Block | str | Sequence[int | None] | None = None,
    weights: Model | None = None,
) -> Estimate:
    """See :meth:`NPU.estimate`."""
    if not isinstance(model, nn.Module):
        raise SmartpruneError(
            f"NPU.estimate: model is a {type(model).__name__}; give the torch.nn.Module, and its file as weights="
        )
    source = read_source(model if weights is None else weights)
    if block is None:
        block = (npu.rows, npu.columns) if source.receipt is None else source.receipt.block
    block = Block.of(block)
    check_not_masked(model.state_dict(), type(model).__name__)
    layers, skipped = every_layer(model, block) if next(candidates(model), None) else ((), ())
    calls = find_calls(model, layers, example)
    rows = [_layer_cycles(npu, layer, calls[layer.name], _live_blocks(model, layer, source)) for layer in layers]
    if not any(row.calls for row in rows):
        raise SmartpruneError("NPU.estimate: the example reaches no convolution or linear layer; give an input of the model")
    return Estimate(npu, block, source.where, tuple(rows), skipped)


def _live_blocks(model: nn.Module, layer: Layer, source: Source) -> Tensor:
    """The blocks of a layer that cannot be skipped, bool [n]."""
    tensor = source.get(layer.weight)
    if tensor is None or tuple(tensor.shape) != layer.grid.weight_shape:
        shape = "missing" if tensor is None else text.format_shape(tensor.shape)
        raise SmartpruneError(
            f"NPU.estimate: {layer.weight} is {text.format_shape(layer.grid.weight_shape)} in the model and {shape} in "
            f"{source.where}; give the weights of this model"
        )
    try:
        live = occupied(layer.grid, tensor)
    except SmartpruneError as error:
        raise SmartpruneError(f"NPU.estimate: {layer.weight}: {error}") from None
    if not zeros_survive(model.get_submodule(layer.sites[0][0])):
        live.fill_(True)
    return live


def _layer_cycles(npu: NPU, layer: Layer, calls: Sequence[Sequence[Call]], live: Tensor) -> LayerCycles:
    work = Work(layer.grid, layer.transposed)
    return LayerCycles(
        name=layer.name,
        weight=layer.weight,
        kind=layer.kind,
        shape=layer.grid.weight_shape,
        blocks=Count(layer.n, int(live.sum())),
        calls=len(calls),
        lanes=npu.lanes,
        dense=Cost.sum([dense(npu, work, call) for call in calls]),
        pruned=Cost.sum([pruned(npu, work, call, live) for call in calls]),
    )


@dataclass(frozen=True)
class LayerCycles:
    """One layer: its cost dense, and with its zero blocks skipped. ``calls`` counts its runs in one forward pass."""

    name: str
    weight: str
    kind: str
    shape: tuple[int, ...]
    blocks: Count
    calls: int
    lanes: int
    dense: Cost
    pruned: Cost

    @property
    def speedup(self) -> float:
        return _ratio(self.dense.latency, self.pruned.latency)

    @property
    def mac_speedup(self) -> float:
        """The speed-up of the multiplications alone. ``speedup`` is at most this if the dense layer never waits for memory and its
        lanes are even."""
        return _ratio(self.dense.mac, self.pruned.mac)

    @property
    def imbalance(self) -> float:
        """Cycles of the slowest lane over the mean of all lanes; 1 is even."""
        return self.pruned.compute * self.lanes / self.pruned.busy if self.pruned.busy else 1.0

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "weight": self.weight,
            "kind": self.kind,
            "shape": list(self.shape),
            "blocks": self.blocks.to_json(),
            "calls": self.calls,
            "imbalance": self.imbalance,
            "dense": self.dense.to_json(),
            "pruned": self.pruned.to_json(),
        }


@dataclass(frozen=True)
class Estimate:
    """The result of :meth:`NPU.estimate`. ``str`` is a table 80 columns wide."""

    npu: NPU
    block: Block
    where: str
    layers: tuple[LayerCycles, ...]
    skipped: tuple[Skipped, ...]  # weights that are not counted

    @property
    def dense(self) -> Cost:
        return Cost.sum([layer.dense for layer in self.layers])

    @property
    def pruned(self) -> Cost:
        return Cost.sum([layer.pruned for layer in self.layers])

    @property
    def latency(self) -> int:
        """Cycles of all layers, one after the other, with zero blocks skipped."""
        return self.pruned.latency

    @property
    def ms(self) -> float:
        return self.npu.ms(self.latency)

    @property
    def speedup(self) -> float:
        return _ratio(self.dense.latency, self.latency)

    @property
    def mac_speedup(self) -> float:
        """The speed-up of the multiplications alone, with free memory and even lanes. The NPU may gain less, or more: where the
        dense model waits for weights, pruning shortens that wait as well."""
        return _ratio(self.dense.mac, self.pruned.mac)

    def share(self, ms: float) -> Fraction:
        """The share of the model's dense time to remove in order to reach ``ms``; for ``cycles(..., of="model")``.

        >>> import torch
        >>> npu = NPU(clock_mhz=0.001, weight_bandwidth=math.inf, activation_bandwidth=math.inf)
        >>> float(npu.estimate(nn.Linear(32, 32), torch.zeros(1, 32)).share(ms=6))
        0.333333334
        """
        if not isinstance(ms, (int, float)) or isinstance(ms, bool) or not 0 < ms < math.inf:
            raise SmartpruneError(f"share: ms={ms!r} must be a number above 0: the milliseconds to reach")
        left = Fraction(str(ms)) * Fraction(str(self.npu.clock_mhz)) * 1000 / self.dense.latency
        # up to nine digits, rounded up so that the goal is reached
        return as_share(Fraction(math.ceil(max(Fraction(0), 1 - left) * 10**9), 10**9), "share")

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            "where": self.where,
            "npu": self.npu.to_json(),
            "block": str(self.block),
            "dense": self.dense.to_json(),
            "pruned": self.pruned.to_json(),
            "dense_ms": self.npu.ms(self.dense.latency),
            "ms": self.ms,
            "speedup": self.speedup,
            "mac_speedup": self.mac_speedup,
            "layers": [layer.to_json() for layer in self.layers],
            "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in self.skipped],
        }

    def __repr__(self) -> str:
        cycles = f"{self.latency:,} of {self.dense.latency:,} cycles, {self.ms:.3g} ms"
        return f"<Estimate of {self.where}: {text.counted(len(self.layers), 'layer')}, {cycles}>"

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                text.percent(layer.blocks.kept, layer.blocks.total),
                f"{layer.dense.latency:,}",
                f"{layer.pruned.latency:,}",
                f"{layer.speedup:.2f}",
                f"{layer.mac_speedup:.2f}",
                f"{layer.imbalance:.2f}",
                layer.pruned.waits_for,
            )
            for layer in self.layers
        ]
        header = ("layer", "kept", "dense", "pruned", "times", "MAC-only", "uneven", "waits for")
        before, after = self.dense, self.pruned
        totals = [
            ("latency, cycles", before.latency, after.latency),
            ("MAC-only cycles", before.mac, after.mac),
            ("bytes of weights moved", before.weight_bytes, after.weight_bytes),
            ("bytes of activations moved", before.activation_bytes, after.activation_bytes),
        ]
        sums = [(name, f"{a:,}", f"{b:,}", f"{_ratio(a, b):.2f}") for name, a, b in totals]
        lines = [
            f"{self.where}, blocks of {self.block}, one sample",
            str(self.npu),
            "",
            *text.table(header, rows, "<>>>>>><", WIDTH),
            "",
            *text.table(("", "dense", "pruned", "times"), sums, "<>>>", WIDTH),
            "",
            f"time     {self.npu.ms(before.latency):.4g} ms dense, {self.ms:.4g} ms pruned",
        ]
        if self.skipped:
            missing = [(s.name, text.format_shape(s.shape), s.reason) for s in self.skipped]
            lines += ["", *text.table(("not counted", "weight", "reason"), missing, "<<<", WIDTH, (0, 2))]
        return "\n".join(lines)


def _ratio(before: int, after: int) -> float:
    """``before / after``, where zero cycles afterwards count as one."""
    return before / max(after, 1) if before else 1.0
