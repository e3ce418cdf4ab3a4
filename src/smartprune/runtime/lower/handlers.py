"""Handlers: how a module, function or method of torch becomes a step.

A handler has the signature of what it handles, after the context and the node. It returns None for what the kernels do not
support, and torch then runs the node. The tables at the end name all handlers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .context import Context, Handler, is_map
from .elementwise import (
    binary,
    clamp,
    divide,
    elu,
    gelu,
    gelu_of,
    hardtanh,
    leaky_relu,
    negate,
    prelu_of,
    subtract,
    unary,
    unary_module,
)
from .layers import batch_norm, convolution, linear
from .normalization import layer_norm, log_softmax, softmax, softmax_module
from .one_dimension import size_of_map
from .pooling import (
    adaptive_average_pool,
    adaptive_max_pool,
    average_pool,
    average_pool_module,
    average_pool_of_sequences,
    largest,
    max_pool,
    max_pool_module,
    mean,
    upsample,
    upsample_module,
)
from .steps import Activation, Step

# ---- operations that only move numbers


def concatenate(context: Context, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Step | None:
    parts = list(tensors)
    if not all(context.is_map(part) for part in parts) or len({len(context.shapes[part]) for part in parts}) != 1:
        return None
    return Step("cat", node, parts) if dim % len(context.shapes[parts[0]]) == 1 else None


def same(context: Context, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Step | None:
    """The handler of what returns its input, such as dropout."""
    if context.shape(x) is None or context.shape(x) != context.shape(node) or not (x in context.rows or context.is_map(x)):
        return None
    return Step("alias", node, [x], x in context.rows)


def dropout(
    context: Context, node: fx.Node, input: fx.Node, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Step | None:
    return None if training else same(context, node, input)


def reshape(context: Context, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Step | None:
    """Flattening a map with one pixel, adding the axes of such a pixel, and removing the only row move nothing."""
    before, after = context.shape(x), context.shape(node)
    if before is None or after is None or not context.is_map(x) or not (is_map(after) or node in context.maps):
        return None
    return Step("alias", node, [x]) if size_of_map(before) == size_of_map(after) else None


def of_module(handler: Handler) -> Handler:
    """The handler of a module whose settings do not matter."""
    return lambda context, node, module, x: handler(context, node, x)


# ---- tables

RELU, RELU6 = Activation("clamp", 0.0), Activation("clamp", 0.0, 6.0)
SILU, SIGMOID = Activation("silu"), Activation("sigmoid")
TANH, MISH = Activation("tanh"), Activation("mish")
HARDSWISH, HARDSIGMOID = Activation("hardswish"), Activation("hardsigmoid")

MODULES: dict[type[nn.Module], Handler] = {
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm1d: batch_norm,
    nn.MaxPool1d: max_pool_module,
    nn.MaxPool2d: max_pool_module,
    nn.AvgPool1d: average_pool_of_sequences,
    nn.AvgPool2d: average_pool_module,
    nn.AdaptiveAvgPool1d: of_module(adaptive_average_pool),
    nn.AdaptiveAvgPool2d: of_module(adaptive_average_pool),
    nn.AdaptiveMaxPool1d: of_module(adaptive_max_pool),
    nn.AdaptiveMaxPool2d: of_module(adaptive_max_pool),
    nn.Upsample: upsample_module,
    nn.UpsamplingNearest2d: upsample_module,
    nn.ReLU: unary_module(lambda m: RELU),
    nn.ReLU6: unary_module(lambda m: RELU6),
    nn.Hardtanh: unary_module(lambda m: Activation("clamp", float(m.min_val), float(m.max_val))),
    nn.SiLU: unary_module(lambda m: SILU),
    nn.Sigmoid: unary_module(lambda m: SIGMOID),
    nn.Hardswish: unary_module(lambda m: HARDSWISH),
    nn.Hardsigmoid: unary_module(lambda m: HARDSIGMOID),
    nn.LeakyReLU: unary_module(lambda m: Activation("leaky", slope=float(m.negative_slope))),
    nn.PReLU: unary_module(prelu_of),
    nn.GELU: unary_module(lambda m: gelu_of(m.approximate)),
    nn.Tanh: unary_module(lambda m: TANH),
    nn.ELU: unary_module(lambda m: Activation("elu", slope=float(m.alpha))),
    nn.Mish: unary_module(lambda m: MISH),
    nn.Softmax: softmax_module,
    nn.LogSoftmax: softmax_module,
    nn.LayerNorm: layer_norm,
    nn.Dropout: of_module(same),
    nn.Dropout2d: of_module(same),
    nn.Identity: of_module(same),
    nn.Flatten: of_module(reshape),
}

FUNCTIONS: dict[Any, Handler] = {
    F.relu: unary(RELU),
    torch.relu: unary(RELU),
    torch.relu_: unary(RELU),
    F.relu6: unary(RELU6),
    F.silu: unary(SILU),
    torch.sigmoid: unary(SIGMOID),
    F.sigmoid: unary(SIGMOID),
    F.hardswish: unary(HARDSWISH),
    F.hardsigmoid: unary(HARDSIGMOID),
    F.leaky_relu: leaky_relu,
    F.gelu: gelu,
    F.tanh: unary(TANH),
    torch.tanh: unary(TANH),
    F.elu: elu,
    F.mish: unary(MISH),
    F.softmax: softmax,
    torch.softmax: softmax,
    F.log_softmax: log_softmax,
    torch.log_softmax: log_softmax,
    F.hardtanh: hardtanh,
    torch.clamp: clamp,
    F.dropout: dropout,
    F.max_pool2d: max_pool,
    F.avg_pool2d: average_pool,
    F.adaptive_avg_pool2d: adaptive_average_pool,
    F.adaptive_max_pool2d: adaptive_max_pool,
    F.max_pool1d: max_pool,
    F.avg_pool1d: average_pool,
    F.adaptive_avg_pool1d: adaptive_average_pool,
    torch.mean: mean,
    torch.amax: largest,
    F.interpolate: upsample,
    torch.cat: concatenate,
    torch.concat: concatenate,
    torch.flatten: reshape,
    torch.reshape: reshape,
    operator.add: binary("add"),
    operator.iadd: binary("add"),
    torch.add: binary("add"),
    operator.mul: binary("multiply"),
    operator.imul: binary("multiply"),
    torch.mul: binary("multiply"),
    operator.sub: subtract,
    operator.isub: subtract,
    torch.sub: subtract,
    operator.truediv: divide,
    operator.itruediv: divide,
    torch.div: divide,
    operator.neg: negate,
    torch.neg: negate,
}

METHODS: dict[str, Handler] = {
    "relu": unary(RELU),
    "relu_": unary(RELU),
    "sigmoid": unary(SIGMOID),
    "tanh": unary(TANH),
    "softmax": softmax,
    "log_softmax": log_softmax,
    "clamp": clamp,
    "mean": mean,
    "amax": largest,
    "flatten": reshape,
    "view": reshape,
    "reshape": reshape,
    "squeeze": reshape,
    "add": binary("add"),
    "add_": binary("add"),
    "mul": binary("multiply"),
    "sub": subtract,
    "div": divide,
    "contiguous": same,
}

_WITH_AXES = (
    linear,
    layer_norm,
    reshape,
    softmax,
    softmax_module,
    log_softmax,
)  # handlers of operations whose results have other axes
ELEMENTWISE = {
    name
    for table in (MODULES, FUNCTIONS, METHODS)
    for name, handler in table.items()
    if handler not in _WITH_AXES and name is not nn.Flatten
}
