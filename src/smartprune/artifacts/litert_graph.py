"""LiteRT graphs under construction: tensors, operations, and how a tensor of torch is stored in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..errors import SmartpruneError

NHWC = (0, 2, 3, 1)
RELU, RELU6 = "RELU", "RELU6"
FUSED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "SUB", "MUL")  # operations that take an activation


@dataclass
class Quantized:
    """How integers represent numbers: ``scale * (integer - zero_point)``. Several scales belong to the positions of ``axis``."""

    scale: Any  # float32 [n]
    zero_point: int = 0
    axis: int = 0


@dataclass(eq=False)
class Value:
    """A tensor of the file. It has an ``array`` if it is constant."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"  # of numpy
    array: Any = None
    quantized: Quantized | None = None
    weight: str = ""  # the parameter of torch that this is, possibly scaled, and with other axes
    not_negative: bool = False


@dataclass(eq=False)
class Operation:
    """An operation of the file. ``options`` are the fields of its options, and ``table`` is their name in the schema."""

    code: str
    inputs: list[Value | None]
    outputs: list[Value]
    table: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def activation(self) -> str | None:
        name: str | None = self.options.get("fusedActivationFunction")
        return name


@dataclass(frozen=True)
class Handle:
    """A tensor of torch in the graph: axis ``i`` of ``value`` is axis ``order[i]`` of the tensor."""

    value: Value
    order: tuple[int, ...]
    alone: bool = True  # whether one operation reads it, so that this one may change how it is computed

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor of torch."""
        return tuple(self.value.shape[self.order.index(axis)] for axis in range(len(self.order)))


Operand = Handle | Tensor | float | int | bool


@dataclass
class Net:
    """The graph so far."""

    names: dict[int, str] = field(default_factory=dict)  # id of a parameter -> its name
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    makers: dict[int, Operation] = field(default_factory=dict)  # id of a value -> the operation that computes it
    orders: dict[tuple[int, tuple[int, ...]], Value] = field(default_factory=dict)  # values in another order, by id
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> its shape in torch
    keep: list[Tensor] = field(default_factory=list)  # whose ids are in use
    node: str = ""  # what is being translated
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"{self.node or 'value'}:{self.count}"

    def constant(self, array: Any, weight: str = "") -> Value:
        array = np.ascontiguousarray(array)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        return Value(weight or self.name(), array.shape, str(array.dtype), array, weight=weight)

    def integers(self, *numbers: int) -> Value:
        return self.constant(np.array(numbers, np.int32))

    def add(
        self, code: str, inputs: Sequence[Value | None], shape: Sequence[int], table: str = "", dtype: str = "", **options: Any
    ) -> Value:
        """Adds an operation with one output, and returns the output."""
        first = next(value for value in inputs if value is not None)
        out = Value(self.name(), tuple(int(n) for n in shape), dtype or first.dtype)
        operation = Operation(code, list(inputs), [out], table, options)
        self.operations.append(operation)
        self.makers[id(out)] = operation
        return out

    def maker(self, x: Handle) -> Operation | None:
        """The operation that computes ``x``, if it computes nothing else and may be changed."""
        return self.makers.get(id(x.value)) if x.alone else None

    def permute(self, x: Handle, order: tuple[int, ...]) -> Value:
        """The value of ``x`` with its axes in this order."""
        if x.order == order:
            return x.value
        key = (id(x.value), tuple(x.order.index(axis) for axis in order))
        if key not in self.orders:
            shape = [x.shape[axis] for axis in order]
            moved = [axis for axis in x.order if x.shape[axis] > 1] != [axis for axis in order if x.shape[axis] > 1]
            if moved:
                out = self.add("TRANSPOSE", [x.value, self.integers(*key[1])], shape, "TransposeOptions")
            else:  # axes of size 1 have no order
                out = self.reshape(x.value, shape)
            out.not_negative = x.value.not_negative
            self.orders[key] = out
        return self.orders[key]

    def plain(self, x: Handle) -> Value:
        """The value of ``x`` with its axes as in torch."""
        return self.permute(x, tuple(range(len(x.order))))

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        if value.shape == tuple(shape):
            return value
        out = self.add("RESHAPE", [value, self.integers(*shape)], shape, "ReshapeOptions", newShape=[int(n) for n in shape])
        out.not_negative = value.not_negative
        return out

    def tensor_of(self, x: Operand) -> Value:
        """Any operand in the order of torch."""
        return self.plain(x) if isinstance(x, Handle) else self.constant(array_of(x))


def array_of(x: object) -> Any:
    """A constant as numpy has it: float32 for every floating-point type."""
    tensor = x if isinstance(x, Tensor) else torch.tensor(x)
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def f32(*numbers: float) -> Any:
    """A vector of numbers in float32."""
    return np.array(numbers, np.float32)


def plain_order(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def unsupported(node: fx.Node | str, what: str, allowed: str) -> SmartpruneError:
    """The error for an operation that cannot be exported."""
    return SmartpruneError(f"export_litert: {node}: {what} cannot be exported to LiteRT; {allowed}")
