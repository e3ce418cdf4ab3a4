"""Handlers of what compares the channels of a pixel: softmax and layer norm."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx, nn

from .context import Context, numpy
from .steps import Activation, Step


def softmax(
    context: Context,
    node: fx.Node,
    x: fx.Node,
    dim: Any = None,
    _stacklevel: int = 3,
    dtype: Any = None,
    *,
    logarithm: bool = False,
) -> Step | None:
    shape = context.shape(x)
    if shape is None or not all(shape) or dtype is not None or type(dim) is not int:
        return None
    rows = not context.is_map(x)
    if len(shape) < 2 or dim % len(shape) != (len(shape) - 1 if rows else 1):
        return None
    return Step("softmax", node, [x], rows, window={"flag": int(logarithm)})


def log_softmax(
    context: Context, node: fx.Node, x: fx.Node, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Step | None:
    return softmax(context, node, x, dim, dtype=dtype, logarithm=True)


def softmax_module(context: Context, node: fx.Node, module: nn.Softmax | nn.LogSoftmax, x: fx.Node) -> Step | None:
    return softmax(context, node, x, module.dim, logarithm=isinstance(module, nn.LogSoftmax))


def layer_norm(context: Context, node: fx.Node, module: nn.LayerNorm, x: fx.Node) -> Step | None:
    """Over the last axis: the channels of rows, or of a map without pixels."""
    shape = context.shape(x)
    if shape is None or not all(shape) or len(module.normalized_shape) != 1 or len(shape) < 2 or x in context.maps:
        return None
    rows = len(shape) > 2
    if not rows and x in context.rows:
        return None
    ones = np.ones(shape[-1], np.float32)
    scale = ones if module.weight is None else numpy(module.weight)
    bias = 0 * ones if module.bias is None else numpy(module.bias)
    return Step("layer_norm", node, [x], rows, scale=scale, bias=bias, activation=Activation(slope=module.eps))
