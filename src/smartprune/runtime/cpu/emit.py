"""From steps to the operations that the kernels execute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import fx

from ..lower.steps import Step
from . import abi, half, quantize
from .arena import ALIGN, Arena, Value
from .entries import LANES, Entries, cut
from .gather import positions
from .instruction_sets import InstructionSet
from .tiles import parts_of_groups, tile

LIGHT = 20_000  # vector operations below which an operation runs in one thread
CHUNK = 1 << 24  # bytes of an array of weights; memory that is never written to takes no space

Packed = dict[Any, Any]  # kept weights by step and dtype: plans for other input shapes share them


class Emitter:
    """Collects the operations of a program, and the arrays that they point to."""

    def __init__(self, values: Mapping[fx.Node, Value], arena: Arena, isa: InstructionSet, threads: int, packed: Packed) -> None:
        self.values, self.arena, self.isa = values, arena, isa
        self.threads, self.packed = threads, packed
        self.operations: list[abi.Op] = []
        self.light: list[bool] = []
        self.arrays: list[Any] = []
        self.free: Any = np.empty(0, np.uint8)  # the rest of the last large array of weights

    def emit_import(self, node: fx.Node, number: int) -> None:
        self._add("import", y=self.values[node], argument=number)

    def emit_export(self, node: fx.Node, number: int) -> None:
        self._add("export", x=self.values[node], argument=number)

    def emit(self, step: Step) -> None:
        """Adds the operations of a step."""
        x, y = self.values[step.inputs[0]], self.values[step.node]
        z = self.values[step.inputs[-1]] if len(step.inputs) > 1 else None
        emitters: dict[str, Callable[[Step, Value, Value, Value | None, dict[str, Any]], None]] = {
            "conv": self._convolution,
            "depthwise": self._depthwise,
            "affine": self._affine,
            "cat": self._concatenation,
            "alias": self._alias,
            "gather": self._gather,
            "softmax": self._over_channels,
            "layer_norm": self._over_channels,
        }
        emitters.get(step.kind, self._other)(step, x, y, z, _fields(step))

    # ---- kinds of steps

    def _convolution(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        assert step.weight is not None
        assert step.bias is not None
        per_word = 1
        if x.type == abi.QUANTUM:
            quantized = quantize.pack(step, x, y, z, self.isa, self.packed)
            entries, words, bias = quantized.entries, quantized.words, quantized.bias
            per_word = self.isa.quanta_per_word
            channels = entries.groups * entries.lanes
            fields |= {"low": quantized.low, "high": quantized.high, "scale": self._address(padded(quantized.scale, channels))}
            fields["initial_sum"] = self._address(padded(quantized.initial_sum, channels))
        elif x.type == abi.FLOAT16:
            entries, words, scale = half.pack(step, x, self.packed)
            bias, fields["scale"] = step.bias, self._address(padded(scale, entries.groups * entries.lanes))
        else:
            key = (step.node, "float32")
            if key not in self.packed:
                self.packed[key] = cut(step.weight, self.isa.lanes)
            entries, bias = self.packed[key], step.bias
            words = entries.values
        pixels = self.isa.half_pixels if x.type == abi.FLOAT16 and self.isa.half_pixels else self.isa.pixels
        tiling = tile(step, x, y, z, self.arena.element_bytes(x), pixels, self.threads)
        groups_per_item = -(-entries.groups // parts_of_groups(tiling.chunks, entries, self.threads))
        work = int(entries.cost * y.images * y.height * y.width) + y.images * y.blocks * y.height * y.width
        fields |= {
            "addition": abi.ADDITION[step.addition],
            "inner": entries.inner // per_word,
            "lanes": entries.lanes,
            "groups": entries.groups,
            "groups_per_item": groups_per_item,
            "chunks": tiling.chunks,
            "items": tiling.chunks * -(-entries.groups // groups_per_item),
            "group_start": self._address(entries.start),
            "entry_offset": self._address((_offsets(entries, step, x) // per_word).astype(np.int32)),
            "weight": self._aligned_address(words),
            "bias": self._address(padded(bias, entries.groups * entries.lanes)),
            "run": self._address(tiling.runs),
            "chunk_start": self._address(tiling.chunk_start),
            **{name: self._address(array) for name, array in tiling.starts.items()},
        }
        self._add("conv", x, y, z, work=work, **fields)

    def _depthwise(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        assert step.weight is not None
        _, kh, kw = step.weight.shape
        channels = y.blocks * LANES
        weight = np.zeros((channels, kh, kw), np.float32)
        weight[: y.channels] = step.weight
        bias = padded(step.bias, channels)
        if x.type == abi.QUANTUM:
            quantized = quantize.pack_depthwise(step, weight, bias, x, y, self.isa)
            weight, bias = quantized.weight, quantized.bias
            fields |= {"low": quantized.low, "high": quantized.high, "scale": self._address(quantized.scale)}
            if quantized.words:
                fields["inner"] = quantized.words
        elif x.type == abi.FLOAT16:
            weight = weight * np.float32(x.scale)
        if not fields.get("inner"):
            weight = weight.reshape(y.blocks, LANES, kh * kw).transpose(0, 2, 1)
        self._add("depthwise", x, y, weight=self._address(weight), bias=self._address(bias), **fields)

    def _affine(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        channels = y.blocks * LANES
        scale, bias = self._address(padded(step.scale, channels)), self._address(padded(step.bias, channels))
        self._add("affine", x, y, scale=scale, bias=bias, **fields)

    def _concatenation(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        first = 0
        for source in step.inputs:
            part = self.values[source]
            if part.whole is not y:
                self._copy(part, y, first)
            first += part.channels

    def _alias(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        self._copy(x, y, 0)

    def _over_channels(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        if step.scale is not None:
            channels = y.blocks * LANES
            fields |= {name: self._address(padded(array, channels)) for name, array in (("scale", step.scale), ("bias", step.bias))}
        self._add(step.kind, x, y, items=x.images, **fields)

    def _gather(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        tables = positions(step.index, x, y)
        names = ("x_start", "y_start", "z_start", "run")[: len(tables)]
        fields |= {name: self._address(table) for name, table in zip(names, tables, strict=True)}
        self._add("gather", x, y, flag=int(len(tables) == 1), **fields)

    def _other(self, step: Step, x: Value, y: Value, z: Value | None, fields: dict[str, Any]) -> None:
        if step.scale is not None:
            fields["scale"] = self._address(step.scale)
        self._add(step.kind, x, y, z, **fields)

    def _copy(self, part: Value, y: Value, first: int) -> None:
        """Copies a value to the channels of another value from ``first`` on."""
        if first % LANES == 0 and (part.channels % LANES == 0 or first + part.channels == y.channels):
            view = Value(y.images, part.channels, y.height, y.width, margin=y.margin, whole=y, block=first // LANES)
            view.type, view.scale, view.zero = y.type, y.scale, y.zero
            self._add("copy", part, view)
        else:
            self._add("shift", part, y, argument=first, items=part.images)

    # ---- operations and arrays

    def _add(
        self,
        kind: str,
        x: Value | None = None,
        y: Value | None = None,
        z: Value | None = None,
        work: int = 0,
        **fields: Any,
    ) -> None:
        """Adds an operation. ``work`` is its number of vector operations, if the size of the result does not say it."""
        op = abi.Op(kind=abi.OPERATION[kind], low=-math.inf, high=math.inf)
        for field, value in (("x", x), ("y", y), ("z", z)):
            if value is not None:
                setattr(op, field, self.arena.tensor(value))
        result = y or x
        assert result is not None
        op.items = result.images * result.blocks
        for field, number in fields.items():
            setattr(op, field, number)
        work = work or result.images * result.blocks * result.height * result.width * max(1, op.kh * op.kw)
        self.light.append(work < LIGHT)
        self.operations.append(op)

    def _address(self, array: Any) -> int:
        """The address of an array, which is kept as long as the program."""
        array = np.ascontiguousarray(array)
        self.arrays.append(array)
        return int(array.ctypes.data)

    def _aligned_address(self, array: Any) -> int:
        """Like :meth:`_address`, at the start of a cache line: a vector of weights is one line.

        Weights lie side by side in large arrays, for which numpy requests huge pages.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size + ALIGN > CHUNK // 2:
            free = self._new_array(data.size + ALIGN)
        else:
            if data.size + ALIGN > self.free.size:
                self.free = self._new_array(CHUNK)
            free = self.free
        address = int(free.ctypes.data)
        start: int = -address % ALIGN
        free[start : start + data.size] = data
        if free is self.free:
            self.free = free[start + max(data.size, ALIGN) :]  # no two weights have the same address, even if one is empty
        return address + start

    def _new_array(self, size: int) -> Any:
        array = np.empty(size, np.uint8)
        self.arrays.append(array)
        return array


def _fields(step: Step) -> dict[str, Any]:
    """The fields of an operation that all kinds of steps share."""
    activation = step.activation
    fields: dict[str, Any] = {"activation": abi.ACTIVATION[activation.name], "slope": activation.slope}
    return fields | {"low": activation.low, "high": activation.high} | step.window


def _offsets(entries: Entries, step: Step, x: Value) -> Any:
    """The position of the input channels of every entry, in elements from the pixel."""
    k = step.window
    channel = entries.channel.astype(np.int64)
    kernel_position = entries.row * (k["dh"] * x.row) + entries.column * (k["dw"] * LANES)
    return kernel_position + channel // LANES * x.plane + channel % LANES


def padded(array: Any, length: int, fill: float = 0.0) -> Any:
    """The array, extended to this length."""
    out = np.full(length, fill, np.asarray(array).dtype)
    out[: len(array)] = array
    return out
