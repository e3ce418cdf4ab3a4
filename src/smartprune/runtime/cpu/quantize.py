"""int8: one scale per activation, measured on example inputs, and one scale per output channel of a weight.

An activation is stored as an integer q with one of 256 values and means ``scale * (q - zero)``. They go from 0 to 255, or from
-128 where the instruction set multiplies signed bytes. A weight is an integer from -127 to 127
times the scale of its channel. Sums are exact in 32 bits. Each result is rounded once, to nearest with ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from ...errors import SmartpruneError
from ..lower.steps import Step
from .abi import QUANTUM
from .arena import Value
from .entries import LANES, Entries, cut
from .instruction_sets import InstructionSet

LEVELS, WEIGHT_LEVELS = 255, 127
TAPS = 4  # neighbouring pixels that one instruction multiplies in a depthwise convolution
MOST_INPUTS = (2**31 - 1) // (LEVELS * WEIGHT_LEVELS)  # products that a 32-bit sum holds
SAME_SCALE = ("max_pool", "upsample", "cat", "alias", "gather")  # steps that copy numbers, so inputs and output share a scale

Range = tuple[float, float]


def assign_types(
    values: Mapping[fx.Node, Value], steps: Sequence[Step], ranges: Mapping[fx.Node, Range], isa: InstructionSet
) -> None:
    """Makes every activation int8 that a convolution reads, and sets its scale and zero point. The others stay float32."""
    leaders = _leaders(values, steps)
    shared = shared_ranges(values, steps, ranges)
    quantized = {leaders[source] for step in steps if step.kind in ("conv", "depthwise") for source in step.inputs}
    for node, value in values.items():
        if leaders[node] not in quantized:
            continue
        low, high = finite(node, shared[node], "int8")
        value.type = QUANTUM
        value.scale = float(np.float32((high - low) / LEVELS)) or 1.0
        value.zero = isa.lowest_quantum + int(np.clip(np.rint(-low / value.scale), 0, LEVELS))


def shared_ranges(values: Mapping[fx.Node, Value], steps: Sequence[Step], ranges: Mapping[fx.Node, Range]) -> dict[fx.Node, Range]:
    """The range of every activation together with those that have the same scale, and with zero, which padding needs."""
    leaders = _leaders(values, steps)
    joined: dict[fx.Node, Range] = {}
    for node in values:
        low, high = ranges[node]
        joined_low, joined_high = joined.get(leaders[node], (0.0, 0.0))
        joined[leaders[node]] = min(low, joined_low), max(high, joined_high)
    return {node: joined[leaders[node]] for node in values}


def finite(node: fx.Node, measured: Range, dtype: str) -> Range:
    """The range, if it is finite."""
    low, high = measured
    if not np.isfinite(high - low):
        raise SmartpruneError(
            f"accelerate: {node} has values that are not finite for the example, and {dtype} needs finite ones; "
            "check the example or use float32"
        )
    return measured


def _leaders(values: Mapping[fx.Node, Value], steps: Sequence[Step]) -> dict[fx.Node, fx.Node]:
    """For every activation, one of those that share its scale, which is the same for all of them."""
    leader: dict[fx.Node, fx.Node] = {node: node for node in values}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for step in steps:
        if step.kind in SAME_SCALE:
            for source in step.inputs:
                leader[find(source)] = find(step.node)
    return {node: find(node) for node in values}


def weight_scales(weight: Any) -> Any:
    """The scale of every output channel, float32. It is 1 for channels of zeros or of numbers too small to divide by."""
    scales = np.abs(weight.reshape(len(weight), -1)).max(axis=1) / WEIGHT_LEVELS
    return np.where(scales >= np.finfo(np.float32).tiny, scales, 1.0).astype(np.float32)


def quantize_weight(weight: Any) -> tuple[Any, Any]:
    """The weight as integers (stored in float32), and its scales."""
    scales = weight_scales(weight)
    return np.rint(weight / scales.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32), scales


@dataclass(frozen=True)
class QuantizedConvolution:
    """Entries with their weights as words, the initial sums, and what turns a sum into quanta of the output: bias, scale and
    bounds."""

    entries: Entries
    words: Any
    initial_sum: Any
    bias: Any
    scale: Any
    low: float
    high: float


def pack(step: Step, x: Value, y: Value, z: Value | None, isa: InstructionSet, packed: dict[Any, Any]) -> QuantizedConvolution:
    """A convolution as the int8 kernels read it."""
    assert step.bias is not None
    entries, words, weight_scale, sums = _pack_weight(step, isa, packed)
    is_clamp = step.activation.name == "clamp"
    unit = y.scale if is_clamp else 1.0  # other activations are computed in real numbers
    scale = x.scale * weight_scale
    bias = step.bias / unit
    low, high = step.activation.low / unit, step.activation.high / unit
    if is_clamp and step.addition == "before":
        assert z is not None
        bias = bias - z.zero * (z.scale / unit)
    if is_clamp and step.addition != "after" and y.type == QUANTUM:  # the kernel then only rounds
        lowest = float(isa.lowest_quantum)
        bias, low, high = bias + y.zero, max(low + y.zero, lowest), min(high + y.zero, lowest + LEVELS)
    initial_sum = -(sums * x.zero).astype(np.int32)
    return QuantizedConvolution(entries, words, initial_sum, bias.astype(np.float32), (scale / unit).astype(np.float32), low, high)


@dataclass(frozen=True)
class QuantizedDepthwise:
    """The weight of a depthwise convolution, and what turns a sum into quanta of the output. ``words`` per row of the kernel are
    0 if the weight is in floats, [channels, rows, columns]; otherwise it is [blocks, rows, words, channels of a block, 4]."""

    weight: Any
    words: int
    bias: Any
    scale: Any
    low: float
    high: float


def pack_depthwise(step: Step, weight: Any, bias: Any, x: Value, y: Value, isa: InstructionSet) -> QuantizedDepthwise:
    """A depthwise convolution as the int8 kernels read it. ``weight`` and ``bias`` are padded to whole blocks of channels."""
    integers, scales = quantize_weight(weight)
    sums = integers.reshape(len(integers), -1).sum(axis=1, dtype=np.float64)
    scale = scales.astype(np.float64) * x.scale
    bias = bias - sums * scale * x.zero
    low, high = step.activation.low, step.activation.high
    if step.activation.name == "clamp" and y.type == QUANTUM:  # the kernel then only rounds
        lowest = float(isa.lowest_quantum)
        scale, bias = scale / y.scale, bias / y.scale + y.zero
        low, high = max(low / y.scale + y.zero, lowest), min(high / y.scale + y.zero, lowest + LEVELS)
    words = 0
    if isa.quantum_bytes == 1 and step.window["dw"] == 1:  # one instruction multiplies four neighbouring pixels
        channels, rows, columns = integers.shape
        words = -(-columns // TAPS)
        integers = np.pad(integers, ((0, 0), (0, 0), (0, words * TAPS - columns))).astype(np.int8)
        integers = integers.reshape(channels // LANES, LANES, rows, words, TAPS).transpose(0, 2, 3, 1, 4)
    return QuantizedDepthwise(integers, words, bias.astype(np.float32), scale.astype(np.float32), low, high)


def _pack_weight(step: Step, isa: InstructionSet, packed: dict[Any, Any]) -> Any:
    """Entries, words, scales, and the sum of the integers of every output channel; computed once per model."""
    assert step.weight is not None
    key = (step.node, "int8")
    if key not in packed:
        if step.weight[0].size > MOST_INPUTS:
            raise SmartpruneError(
                f"accelerate: {step.node} adds {step.weight[0].size:,} products, and an int8 sum holds at most {MOST_INPUTS:,}; "
                "use float32"
            )
        per_word = isa.quanta_per_word
        integers, scales = quantize_weight(step.weight)
        entries = cut(integers, isa.lanes, multiple=per_word)
        words = entries.values.reshape(entries.count, entries.inner // per_word, per_word, entries.lanes)
        words = np.ascontiguousarray(words.transpose(0, 1, 3, 2)).astype(np.int16 if isa.quantum_bytes == 2 else np.int8)
        sums = integers.reshape(len(integers), -1).sum(axis=1, dtype=np.int64)
        packed[key] = entries, words, scales.astype(np.float64), sums
    return packed[key]
