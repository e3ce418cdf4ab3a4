"""Quantization of a LiteRT graph to int8, from the ranges that its tensors have on real inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .litert_graph import Net, Operation, Quantized, Value, f32
from .litert_layers import LOWEST
from .litert_run import Ranges

# The input that holds the weight, and its axis of output channels. Scales are per channel, and zero is zero.
WEIGHTS = {"CONV_2D": (1, 0), "DEPTHWISE_CONV_2D": (1, 3), "FULLY_CONNECTED": (1, 0), "TRANSPOSE_CONV": (1, 0)}
DATA = {"TRANSPOSE_CONV": 2}  # the input that holds the activations, where it is not the first
ONE_SCALE = {  # operations whose inputs and output have the same scale
    "MAX_POOL_2D", "AVERAGE_POOL_2D", "RESHAPE", "TRANSPOSE", "PAD", "PADV2", "SLICE", "STRIDED_SLICE", "RESIZE_BILINEAR",
    "RESIZE_NEAREST_NEIGHBOR", "CONCATENATION", "REDUCE_MAX", "MAXIMUM", "MINIMUM",
}  # fmt: skip
OTHERS = {
    "ADD",
    "SUB",
    "MUL",
    "MEAN",
    "SOFTMAX",
    "LOGISTIC",
    "TANH",
    "LEAKY_RELU",
    "RELU",
    "RELU6",
    "HARD_SWISH",
    "BATCH_MATMUL",
    "GELU",
}
INT8 = {*WEIGHTS, *ONE_SCALE, *OTHERS}  # the rest computes in float
FIXED = {  # the kernels of these demand one scale
    "LOGISTIC": Quantized(f32(1 / 256), -128),
    "SOFTMAX": Quantized(f32(1 / 256), -128),
    "TANH": Quantized(f32(1 / 128), 0),
}
SMALLEST = 2.0**-14  # of the scales of a weight, relative to the largest: kernels cannot represent any ratio
LARGEST_BIAS = 2.0**29
LARGEST_FACTOR = 128.0  # of a sum of products when it is rounded to the output: kernels demand less than 256


def quantize(net: Net, ranges: Ranges) -> tuple[Net, tuple[str, ...]]:
    """A graph that computes in int8 between float inputs and outputs, and the operations that it computes in float."""
    work = _Quantizer(net, ranges)
    work.group()
    for operation in net.operations:
        work.add(operation)
    return work.finish(), tuple(sorted(work.floats_left))


class _Quantizer:
    def __init__(self, net: Net, ranges: Ranges) -> None:
        self.net, self.ranges = net, ranges
        self.out = Net(shapes=net.shapes, inputs=net.inputs)
        self.out.node = "int8"
        self.parents: dict[int, int] = {}  # groups of values with one scale
        self.low_high: dict[int, tuple[float, float]] = {}
        self.fixed: dict[int, Quantized] = {}
        self.int8: dict[int, Value] = {}  # id of a float value -> the same in int8
        self.floats: dict[int, Value] = {id(value): value for value in net.inputs}
        self.requantized: dict[tuple[int, bytes, int], Value] = {}
        self.floats_left: set[str] = set()
        self.keep: list[Value] = []  # values whose ids are in use

    # Groups

    def find(self, value: Value) -> int:
        key = id(value)
        while self.parents.get(key, key) != key:
            key = self.parents[key]
        return key

    def unite(self, a: Value, b: Value) -> None:
        a_root, b_root = self.find(a), self.find(b)
        if a_root != b_root:
            self.parents[b_root] = a_root
            fixed = self.fixed.pop(b_root, None)
            if fixed is not None:
                self.fixed.setdefault(a_root, fixed)

    def group(self) -> None:
        """Finds the values that share a scale. An operation that joins tensors does not take one that is fixed."""
        operations = [operation for operation in self.net.operations if operation.code in INT8]
        for operation in operations:
            if operation.code in FIXED:
                self.fixed[self.find(operation.outputs[0])] = FIXED[operation.code]
            elif operation.code in ONE_SCALE and operation.code != "CONCATENATION":
                self.unite(_data(operation), operation.outputs[0])
        for operation in operations:
            if operation.code == "CONCATENATION":
                for value in operation.inputs:
                    if value is not None and value.array is None and self.find(value) not in self.fixed:
                        self.unite(operation.outputs[0], value)
        values = [value for operation in self.net.operations for value in (*operation.inputs, *operation.outputs)]
        padded = {id(operation.outputs[0]) for operation in operations if _pads_with_lowest(operation)}
        for value in values:
            if value is not None and value.array is None and id(value) not in padded:
                low, high = self.ranges.get(value.name, (0.0, 0.0))
                before = self.low_high.get(self.find(value), (0.0, 0.0))
                self.low_high[self.find(value)] = (min(low, before[0]), max(high, before[1]))
        for operation in operations:
            if operation.code in WEIGHTS:
                self._widen(operation)

    def _widen(self, operation: Operation) -> None:
        """Gives a layer an output range whose steps are not much smaller than those of its products."""
        weight, root = operation.inputs[WEIGHTS[operation.code][0]], self.find(operation.outputs[0])
        if weight is None or weight.array is None or root in self.fixed:
            return
        step = float(self.scale_of(_data(operation)).scale[0]) * float(np.abs(weight.array).max()) / 127
        low, high = self.low_high[root]
        self.low_high[root] = (low, max(high, low + 255 * step / LARGEST_FACTOR))

    def scale_of(self, value: Value) -> Quantized:
        root = self.find(value)
        return self.fixed.get(root) or _activation_scale(*self.low_high.get(root, (0.0, 0.0)))

    # Operations

    def add(self, operation: Operation) -> None:
        data, out = _data(operation), operation.outputs[0]
        if operation.code not in INT8 or data.dtype != "float32" or data.array is not None:
            self.floats_left.add(operation.code)
            inputs = [value if value is None else self.as_float(value) for value in operation.inputs]
            self.emit(Operation(operation.code, inputs, operation.outputs, operation.table, operation.options))
            self.floats[id(out)] = out
            return
        inputs = self._weighted(operation) if operation.code in WEIGHTS else self._unweighted(operation)
        result = Value(f"{out.name}:int8", out.shape, "int8", quantized=self.scale_of(out))
        self.int8[id(out)] = result
        self.emit(Operation(operation.code, inputs, [result], operation.table, operation.options))

    def emit(self, operation: Operation) -> None:
        self.out.operations.append(operation)

    def _unweighted(self, operation: Operation) -> list[Value | None]:
        one_scale = operation.code in ONE_SCALE
        wanted = self.scale_of(operation.outputs[0])
        inputs: list[Value | None] = []
        for value in operation.inputs:
            if value is None or value.dtype != "float32":
                inputs.append(value)
            elif value.array is not None:
                inputs.append(_constant(value, wanted if one_scale else None))
            else:
                inputs.append(self.as_int8(value, wanted if one_scale else None))
        return inputs

    def _weighted(self, operation: Operation) -> list[Value | None]:
        place, axis = WEIGHTS[operation.code]
        inputs, data = list(operation.inputs), _data(operation)
        weight = inputs[place]
        if weight is None or weight.array is None:
            return self._unweighted(operation)
        read = self.as_int8(data)
        assert read.quantized is not None
        bias = (
            inputs[3 if operation.code == "TRANSPOSE_CONV" else 2]
            if len(inputs) > (3 if operation.code == "TRANSPOSE_CONV" else 2)
            else None
        )
        scales = float(read.quantized.scale[0]), float(self.scale_of(operation.outputs[0]).scale[0])
        stored = quantized_weight(weight, axis, None if bias is None else bias.array, *scales)
        inputs[place], inputs[DATA.get(operation.code, 0)] = stored, read
        if bias is not None:
            assert stored.quantized is not None
            scale = stored.quantized.scale.astype(np.float64) * float(read.quantized.scale[0])
            numbers = np.round(bias.array / scale).clip(-(2.0**31), 2.0**31 - 1).astype(np.int32)
            inputs[inputs.index(bias)] = Value(
                f"{bias.name}:int32", bias.shape, "int32", numbers, Quantized(scale.astype(np.float32)), bias.weight
            )
        return inputs

    def as_int8(self, value: Value, wanted: Quantized | None = None) -> Value:
        """The value in int8, in its own scale or another one."""
        if id(value) not in self.int8:
            own = Value(f"{value.name}:int8", value.shape, "int8", quantized=self.scale_of(value))
            self.emit(Operation("QUANTIZE", [self.floats[id(value)]], [own]))
            self.int8[id(value)] = own
        out = self.int8[id(value)]
        assert out.quantized is not None
        if wanted is None or _equal(out.quantized, wanted):
            return out
        key = (id(out), wanted.scale.tobytes(), wanted.zero_point)
        if key not in self.requantized:
            other = Value(f"{value.name}:int8:{len(self.requantized)}", value.shape, "int8", quantized=wanted)
            self.emit(Operation("QUANTIZE", [out], [other]))
            self.requantized[key] = other
        return self.requantized[key]

    def as_float(self, value: Value) -> Value:
        if value.array is not None or value.dtype != "float32":
            return value
        if id(value) not in self.floats:
            self.emit(Operation("DEQUANTIZE", [self.int8[id(value)]], [value]))
            self.floats[id(value)] = value
        return self.floats[id(value)]

    def finish(self) -> Net:
        self.out.outputs = [self.as_float(value) for value in self.net.outputs]
        return self.out


def _data(operation: Operation) -> Value:
    """The first input that is an activation; the first one if all are constant."""
    first = operation.inputs[DATA.get(operation.code, 0)]
    values = [first, *operation.inputs]
    return next((value for value in values if value is not None and value.array is None), first or values[0])  # type: ignore[return-value]


def _pads_with_lowest(operation: Operation) -> bool:
    """Whether it adds numbers for a maximum to ignore. In int8 they become -128, so the range is that of the input."""
    fill = operation.inputs[2] if operation.code == "PADV2" else None
    return fill is not None and fill.array is not None and float(fill.array.max()) <= LOWEST


def _equal(a: Quantized, b: Quantized) -> bool:
    return a.zero_point == b.zero_point and np.array_equal(a.scale, b.scale)


def _activation_scale(low: float, high: float) -> Quantized:
    """Asymmetric, with an exact zero."""
    if high <= low:
        return Quantized(f32(1.0), 0)
    scale = (high - low) / 255
    return Quantized(f32(scale), int(np.clip(np.round(-128 - low / scale), -128, 127)))


def _constant(value: Value, wanted: Quantized | None) -> Value:
    array = value.array
    quantized = wanted or _activation_scale(min(float(array.min()), 0.0), max(float(array.max()), 0.0))
    numbers = np.round(array.astype(np.float64) / float(quantized.scale[0])) + quantized.zero_point
    return Value(f"{value.name}:int8", value.shape, "int8", numbers.clip(-128, 127).astype(np.int8), quantized, value.weight)


def quantized_weight(weight: Value, axis: int, bias: Any, input_scale: float, output_scale: float) -> Value:
    """A weight in int8, symmetric and per output channel. A channel that is empty gets a scale in which its bias fits."""
    array = weight.array.astype(np.float64)
    axes = tuple(i for i in range(array.ndim) if i != axis)
    scales = np.abs(array).max(axis=axes) / 127
    top = float(scales.max()) or output_scale / input_scale / LARGEST_FACTOR  # an empty layer: only its bias counts
    scales = np.where(scales == 0, top, np.maximum(scales, top * SMALLEST))
    if bias is not None:
        scales = np.maximum(scales, np.abs(bias) / (input_scale * LARGEST_BIAS))
    scales = scales.astype(np.float32)
    shape = [1] * array.ndim
    shape[axis] = -1
    numbers = np.round(array / scales.astype(np.float64).reshape(shape)).clip(-127, 127).astype(np.int8)
    return Value(weight.name, weight.shape, "int8", numbers, Quantized(scales, 0, axis), weight.weight)
