"""Handlers of elementwise operations: activations, additions and multiplications."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from .context import Context, Handler
from .steps import Activation, Step


def _pointwise(context: Context, node: fx.Node, x: object, activation: Activation) -> Step | None:
    if not isinstance(x, fx.Node) or x not in context.shapes or not (x in context.rows or context.is_map(x)):
        return None
    return Step("unary", node, [x], x in context.rows, activation=activation)


def unary(activation: Activation) -> Handler:
    """The handler of a function without settings."""

    def handler(context: Context, node: fx.Node, x: fx.Node, inplace: bool = False) -> Step | None:
        return _pointwise(context, node, x, activation)

    return handler


def unary_module(activation_of: Callable[[Any], Activation | None]) -> Handler:
    """The handler of a module with the activation that this function reads from it."""

    def handler(context: Context, node: fx.Node, module: nn.Module, x: fx.Node) -> Step | None:
        activation = activation_of(module)
        return None if activation is None else _pointwise(context, node, x, activation)

    return handler


def clamp(context: Context, node: fx.Node, input: fx.Node, min: Any = None, max: Any = None) -> Step | None:
    if not all(bound is None or isinstance(bound, (int, float)) for bound in (min, max)):
        return None
    limits = Activation("clamp", -math.inf if min is None else float(min), math.inf if max is None else float(max))
    return _pointwise(context, node, input, limits)


def hardtanh(
    context: Context, node: fx.Node, input: fx.Node, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Step | None:
    return _pointwise(context, node, input, Activation("clamp", float(min_val), float(max_val)))


def leaky_relu(context: Context, node: fx.Node, input: fx.Node, negative_slope: float = 0.01, inplace: bool = False) -> Step | None:
    return _pointwise(context, node, input, Activation("leaky", slope=float(negative_slope)))


def gelu(context: Context, node: fx.Node, input: fx.Node, approximate: str = "none") -> Step | None:
    return _pointwise(context, node, input, gelu_of(approximate))


def gelu_of(approximate: str) -> Activation:
    return Activation("gelu" if approximate == "none" else "gelu_tanh")


def elu(context: Context, node: fx.Node, input: fx.Node, alpha: float = 1.0, inplace: bool = False) -> Step | None:
    return _pointwise(context, node, input, Activation("elu", slope=float(alpha)))


def prelu_of(module: nn.PReLU) -> Activation | None:
    """The activation of a PReLU with one slope."""
    return Activation("leaky", slope=float(module.weight)) if module.num_parameters == 1 else None


def binary(kind: str) -> Handler:
    """The handler of an addition or multiplication of two tensors, or of a tensor and a number or constant."""

    def handler(context: Context, node: fx.Node, a: Any, b: Any) -> Step | None:
        if not _is_value(context, a):
            a, b = b, a
        if not _is_value(context, b):
            return _with_constant(context, node, a, b, (lambda c: (1, c)) if kind == "add" else (lambda c: (c, 0)))
        first, second = context.shape(a), context.shape(b)
        if first is None or second is None or context.shape(node) is None:
            return None
        if first == second and len(first) == 3 and (a in context.rows or b in context.rows) and all(first):
            return Step(kind, node, [a, b], True)  # an input of the network may have either layout
        if (a in context.rows) != (b in context.rows):
            return None
        if first == second and (a in context.rows or (context.is_map(a) and context.is_map(b))):
            return Step(kind, node, [a, b], a in context.rows)
        if a in context.rows or len(first) != 4 or len(second) != 4:
            return None
        if context.shape(node) != first:
            a, b, first, second = b, a, second, first
        broadcast = second[0] in (1, first[0]) and second[1] == first[1] and second[2:] in ((1, 1), first[2:])
        return Step(kind, node, [a, b], broadcast=True) if broadcast and context.shape(node) == first else None

    return handler


def subtract(context: Context, node: fx.Node, a: Any, b: Any) -> Step | None:
    if _is_value(context, a):
        return None if _is_value(context, b) else _with_constant(context, node, a, b, lambda c: (1, -c))
    return _with_constant(context, node, b, a, lambda c: (-1, c))


def divide(context: Context, node: fx.Node, a: Any, b: Any) -> Step | None:
    return None if _is_value(context, b) or not _is_value(context, a) else _with_constant(context, node, a, b, lambda c: (1 / c, 0))


def negate(context: Context, node: fx.Node, x: Any) -> Step | None:
    return _with_constant(context, node, x, 0.0, lambda c: (-1, 0))


def _is_value(context: Context, x: Any) -> bool:
    """Whether an operand is computed by the network, and is not a number or a constant."""
    return isinstance(x, fx.Node) and x not in context.constants


def _with_constant(context: Context, node: fx.Node, x: Any, constant: Any, terms: Callable[[Any], tuple[Any, Any]]) -> Step | None:
    """The step x * scale + bias with ``terms`` of a constant that has one number, or one per channel."""
    shape, rows = context.shape(x), x in context.rows
    if shape is None or context.shape(node) != shape or not (rows or context.is_map(x)):
        return None
    axis = len(shape) - 1 if rows else 1
    numbers: Any
    if isinstance(constant, fx.Node):
        axes = (1,) * len(shape) + tuple(context.constants[constant].shape)
        axes = axes[len(axes) - len(shape) :]
        if len(axes) != len(shape) or any(size != 1 for place, size in enumerate(axes) if place != axis):
            return None
        numbers = context.constants[constant].detach().to("cpu", torch.float64).reshape(-1).numpy()
    elif isinstance(constant, (int, float)) and not isinstance(constant, bool):
        numbers = np.float64(constant)
    else:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        scale, bias = (np.broadcast_to(np.float64(term), shape[axis]).astype(np.float32) for term in terms(numbers))
    return Step("affine", node, [x], rows, scale=scale, bias=bias)
