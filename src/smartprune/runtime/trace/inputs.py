"""The inputs of a call: their tensors and numbers in order, and keys that distinguish calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

from ...errors import SmartpruneError

CONSTANT = frozenset(
    (NoneType, bool, str, bytes, complex, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
)


class UnsupportedInput(Exception):  # noqa: N818 - control flow: the model's own code then runs
    """An input of an unknown class. Calls with it cannot be distinguished."""


class Wildcard(Enum):
    """Stands in a key for what may differ between calls with the same structure."""

    TENSOR = "tensor"
    NUMBER = "number"


def call_key(value: Any, leaves: list[Any]) -> Hashable:
    """The key of an input: its structure, shapes, dtypes, numbers and constants.

    Tensors and numbers are appended to ``leaves``, floating-point tensors as float32.
    """
    if isinstance(value, Tensor):
        if not value.is_cpu:
            raise SmartpruneError(
                f"accelerated model: an input is on {value.device}, and this model runs on the CPU; move the input there"
            )
        if value.layout is not torch.strided:
            raise UnsupportedInput(f"a tensor of layout {value.layout}")
        if value.dtype is not torch.float32:
            value = as_float32(value)
        leaves.append(value)
        return value.dtype, value.shape
    kind = type(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return (kind, *[call_key(item, leaves) for item in value])
    if kind is dict or kind is OrderedDict:
        return (kind, *[(name, call_key(item, leaves)) for name, item in value.items()])
    if kind is int or kind is float:
        leaves.append(value)
        return kind, repr(value)  # as text: NaN equals itself, and 0.0 differs from -0.0
    if kind in CONSTANT or isinstance(value, Enum):
        return kind, value
    raise UnsupportedInput(f"a {kind.__name__}")


def as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same input with the function applied to every tensor and number, in the order of :func:`call_key`."""
    kind = type(value)
    if isinstance(value, Tensor) or kind is int or kind is float:
        return function(value)
    if kind is tuple or kind is list:
        return kind(map_leaves(function, item) for item in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*[map_leaves(function, item) for item in value])
    if kind is dict or kind is OrderedDict:
        return kind((name, map_leaves(function, item)) for name, item in value.items())
    return value


def graph_key(value: Any, fixed: bool) -> Hashable:
    """The key of an input without shapes and dtypes and, unless numbers are fixed, without numbers."""

    def wildcard(leaf: Any) -> Any:
        return Wildcard.TENSOR if isinstance(leaf, Tensor) else leaf if fixed else Wildcard.NUMBER

    return call_key(map_leaves(wildcard, value), [])
