"""Handlers of elementwise operations: activations, additions and multiplications."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import fx, nn

from .context import Context, Handler, is_map
from .steps import Activation, Step


def _pointwise(context: Context, node: fx.Node, x: object, activation: Activation) -> Step | None:
    if not isinstance(x, fx.Node) or x not in context.shapes or not (x in context.rows or is_map(context.shape(x))):
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
    return _pointwise(context, node, input, Activation("gelu")) if approximate == "none" else None


def binary(kind: str) -> Handler:
    """The handler of an addition or multiplication of two tensors, or of a tensor and a number."""

    def handler(context: Context, node: fx.Node, a: Any, b: Any) -> Step | None:
        if isinstance(a, (int, float)):
            a, b = b, a
        if isinstance(b, (int, float)) and not isinstance(b, bool):
            shape = context.shape(a)
            if shape is None or not context.is_map(a):
                return None
            ones = np.ones(shape[1], np.float32)
            scale, shift = (ones, ones * np.float32(b)) if kind == "add" else (ones * np.float32(b), ones * 0)
            return Step("affine", node, [a], scale=scale, bias=shift)
        first, second = context.shape(a), context.shape(b)
        if first is None or second is None or context.shape(node) is None or (a in context.rows) != (b in context.rows):
            return None
        if first == second and (a in context.rows or is_map(first)):
            return Step(kind, node, [a, b], a in context.rows)
        if a in context.rows or len(first) != 4 or len(second) != 4:
            return None
        if context.shape(node) != first:
            a, b, first, second = b, a, second, first
        broadcast = second[0] in (1, first[0]) and second[1] == first[1] and second[2:] in ((1, 1), first[2:])
        return Step(kind, node, [a, b], broadcast=True) if broadcast and context.shape(node) == first else None

    return handler
