"""int8: one scale per activation tensor, from example inputs, and one per output channel of a weight.

An activation is stored as q in 0..255 and means ``scale * (q - zero)``; a weight is -127..127 times its channel's scale.
Sums are exact in 32 bits; each result is rounded once, to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from ...errors import SmartpruneError
from ..lower.steps import Step
from .entries import Entries, cut
from .native import QUANTUM, Library

if TYPE_CHECKING:
    from .program import Value

LEVELS, WEIGHT_LEVELS = 255, 127
MOST_INPUTS = (2**31 - 1) // (LEVELS * WEIGHT_LEVELS)  # products that a 32-bit sum holds
ALIKE = ("max_pool", "upsample", "cat", "alias")  # give what they read: one scale for both sides

Range = tuple[float, float]


def assign(values: Mapping[fx.Node, Value], steps: Sequence[Step], ranges: Mapping[fx.Node, Range]) -> None:
    """Makes every activation int8 that a convolution reads, and gives them their scales; the others stay float32."""
    leader: dict[fx.Node, fx.Node] = {node: node for node in values}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    for step in steps:
        if step.kind in ALIKE:
            for source in step.inputs:
                leader[find(source)] = find(step.node)
    joined: dict[fx.Node, Range] = {}
    for node in values:
        low, high = ranges[node]
        before = joined.get(find(node), (0.0, 0.0))  # zero is always exact: it is what padding means
        joined[find(node)] = min(low, before[0]), max(high, before[1])
    wanted = {find(source) for step in steps if step.kind in ("conv", "depthwise") for source in step.inputs}
    for node, value in values.items():
        if find(node) not in wanted:
            continue
        low, high = joined[find(node)]
        if not np.isfinite(high - low):
            raise SmartpruneError(f"accelerate: the example gives values that are not finite at {node}; int8 needs finite ones")
        value.type = QUANTUM
        value.scale = float(np.float32((high - low) / LEVELS)) or 1.0
        value.zero = int(np.clip(np.rint(-low / value.scale), 0, LEVELS))


def weight_scales(weight: Any) -> Any:
    """The scale of every output channel, float32; 1 for a channel of zeros, or of numbers too small to be divided by."""
    scales = np.abs(weight.reshape(len(weight), -1)).max(axis=1) / WEIGHT_LEVELS
    return np.where(scales >= np.finfo(np.float32).tiny, scales, 1.0).astype(np.float32)


def quantized(weight: Any) -> tuple[Any, Any]:
    """A weight as whole numbers (in float32) and its scales."""
    scales = weight_scales(weight)
    return np.rint(weight / scales.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32), scales


@dataclass(frozen=True)
class Packed:
    """A quantized convolution: entries and their words, where sums begin, and what turns a sum into the result in quanta
    of its output: bias, scale and bounds."""

    entries: Entries
    words: Any
    begin: Any
    bias: Any
    scale: Any
    low: float
    high: float


def pack(step: Step, x: Value, y: Value, z: Value | None, library: Library, packed: dict[Any, Any]) -> Packed:
    """A convolution as the int8 kernels read it."""
    assert step.weight is not None
    assert step.bias is not None
    per_word = 4 // library.quantum_bytes
    key = (step.node, "int8")
    if key not in packed:
        if step.weight[0].size > MOST_INPUTS:
            raise SmartpruneError(
                f"accelerate: {step.node} adds {step.weight[0].size:,} products, more than 32 bits hold; use float32"
            )
        whole, scales = quantized(step.weight)
        entries = cut(whole, library.lanes, multiple=per_word)
        kind = np.int8 if per_word == 4 else np.int16
        words = entries.values.reshape(entries.count, entries.inner // per_word, per_word, entries.lanes)
        words = np.ascontiguousarray(words.transpose(0, 1, 3, 2)).astype(kind)
        packed[key] = entries, words, scales.astype(np.float64), whole.reshape(len(whole), -1).sum(axis=1, dtype=np.int64)
    entries, words, scales, sums = packed[key]
    clamp = step.activation.name == "clamp"
    unit = y.scale if clamp else 1.0  # other activations want real numbers
    scale = x.scale * scales
    bias = step.bias / unit
    low, high = step.activation.low / unit, step.activation.high / unit
    if clamp and step.adding == "before":
        assert z is not None
        bias = bias - z.zero * (z.scale / unit)
    if clamp and step.adding != "after" and y.type == QUANTUM:  # the zero point goes into the bias, the range into the clamp
        bias, low, high = bias + y.zero, max(low + y.zero, 0.0), min(high + y.zero, float(LEVELS))
    begin = -(sums * x.zero).astype(np.int32)
    return Packed(entries, words, begin, bias.astype(np.float32), (scale / unit).astype(np.float32), low, high)
