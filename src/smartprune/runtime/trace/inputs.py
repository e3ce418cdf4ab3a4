"""What a call gives to a model: its tensors and numbers, one after the other, and a key that tells such calls apart."""

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


class Unknown(Exception):  # noqa: N818 - it is no error of anybody's
    """An input of a kind that nothing is known about: calls with it cannot be told apart."""


class Hole(Enum):
    """Stands for what may differ between calls of one form."""

    TENSOR = "tensor"
    NUMBER = "number"


def described(value: Any, leaves: list[Any]) -> Hashable:
    """The key of an input. Its tensors and numbers are added to ``leaves``, tensors of any floating dtype as float32."""
    if isinstance(value, Tensor):
        if not value.is_cpu:
            raise SmartpruneError(f"accelerated model: an input is on {value.device}; this one runs on the CPU")
        if value.layout is not torch.strided:
            raise Unknown(f"a tensor of layout {value.layout}")
        if value.dtype is not torch.float32:
            value = as_float32(value)
        leaves.append(value)
        return value.dtype, value.shape
    kind = type(value)
    if kind is tuple or kind is list or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return (kind, *[described(item, leaves) for item in value])
    if kind is dict or kind is OrderedDict:
        return (kind, *[(name, described(item, leaves)) for name, item in value.items()])
    if kind is int or kind is float:
        leaves.append(value)
        return kind, repr(value)  # as text: NaN equals itself, and 0.0 is not -0.0
    if kind in CONSTANT or isinstance(value, Enum):
        return kind, value
    raise Unknown(f"a {kind.__name__}")


def as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def filled(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same input with something else for every tensor and number, which are met in the order of :func:`described`."""
    kind = type(value)
    if isinstance(value, Tensor) or kind is int or kind is float:
        return leaf(value)
    if kind is tuple or kind is list:
        return kind(filled(item, leaf) for item in value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*[filled(item, leaf) for item in value])
    if kind is dict or kind is OrderedDict:
        return kind((name, filled(item, leaf)) for name, item in value.items())
    return value


def form(value: Any, fixed: bool) -> Hashable:
    """The key of an input without the shapes and dtypes of its tensors and, unless they are fixed, without its numbers."""
    return described(filled(value, lambda x: Hole.TENSOR if isinstance(x, Tensor) else x if fixed else Hole.NUMBER), [])
