"""Handlers: how a module, function or method of torch becomes a step.

A handler has the signature of what it handles, after the context and the node. It returns None for what the kernels do not
support, and torch then runs the node. The tables at the end name all handlers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .steps import Activation, Array, Shape, Step


@dataclass
class Context:
    """What a handler needs to know about the network."""

    modules: Mapping[str, nn.Module]
    shapes: Mapping[fx.Node, Shape]
    rows: set[fx.Node]  # nodes whose value is stored as rows

    def shape(self, node: object) -> Shape | None:
        return self.shapes.get(node) if isinstance(node, fx.Node) else None

    def is_map(self, x: object) -> bool:
        """Whether a value is stored as a map, [images, channels] or [images, channels, rows, columns]."""
        return is_map(self.shape(x)) and x not in self.rows

    def is_spatial(self, x: object) -> bool:
        shape = self.shape(x)
        return shape is not None and len(shape) == 4 and all(shape) and x not in self.rows


Handler = Callable[..., Step | None]


def is_map(shape: Shape | None) -> bool:
    return shape is not None and len(shape) in (2, 4) and all(shape)


def numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def pair(value: Any) -> tuple[int, int]:
    a, b = value if isinstance(value, (tuple, list)) else (value, value)
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError(value)
    return a, b


def window(kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> dict[str, int]:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = pair(kernel), pair(stride), pair(padding), pair(dilation)
    return {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": dh, "dw": dw}


# ---- layers with weights


def convolution(context: Context, node: fx.Node, module: nn.Conv2d, x: fx.Node) -> Step | None:
    if not context.is_spatial(x) or module.padding_mode != "zeros":
        return None
    (kh, kw), (dh, dw) = pair(module.kernel_size), pair(module.dilation)
    padding: Any = module.padding
    if padding == "same":  # torch pads an odd one at the end, where the margin is as wide as needed
        padding = dh * (kh - 1) // 2, dw * (kw - 1) // 2
    elif padding == "valid":
        padding = 0
    area = window(module.kernel_size, module.stride, padding, module.dilation)
    weight = numpy(module.weight)
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_channels, np.float32)
    if module.groups == module.in_channels == module.out_channels and module.groups > 1:
        return Step("depthwise", node, [x], weight=weight[:, 0], bias=bias, window=area)
    if module.groups > 1:  # as one dense weight: kernels skip the zeros between groups like all others
        per_out, per_in = module.out_channels // module.groups, module.in_channels // module.groups
        full = np.zeros((module.out_channels, module.in_channels, kh, kw), np.float32)
        for g in range(module.groups):
            rows = slice(g * per_out, (g + 1) * per_out)
            full[rows, g * per_in : (g + 1) * per_in] = weight[rows]
        weight = full
    return Step("conv", node, [x], weight=weight, bias=bias, window=area)


def linear(context: Context, node: fx.Node, module: nn.Linear, x: fx.Node) -> Step | None:
    shape = context.shape(x)
    if shape is None or len(shape) < 2 or not all(shape):
        return None
    rows = len(shape) > 2
    if not rows and x in context.rows:
        return None
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_features, np.float32)
    return Step("conv", node, [x], rows, weight=numpy(module.weight)[:, :, None, None], bias=bias, window=window(1))


def batch_norm(context: Context, node: fx.Node, module: nn.BatchNorm2d, x: fx.Node) -> Step | None:
    if not context.is_map(x) or module.running_mean is None or module.running_var is None:
        return None
    one = torch.ones(module.num_features, 1, 1, 1, dtype=torch.float64, device="cpu")
    weight = None if module.weight is None else module.weight.double()
    bias = None if module.bias is None else module.bias.double()
    mean, variance = module.running_mean.double(), module.running_var.double()
    scale, shift = fuse_conv_bn_weights(one, None, mean, variance, module.eps, weight, bias)
    return Step("affine", node, [x], scale=numpy(scale).reshape(-1), bias=numpy(shift))


# ---- pooling and upsampling


def max_pool(
    context: Context,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Step | None:
    if return_indices or not context.is_spatial(x):
        return None
    area = window(kernel_size, kernel_size if stride is None else stride, padding, dilation)
    return Step("max_pool", node, [x], window=area)


def max_pool_module(context: Context, node: fx.Node, m: nn.MaxPool2d, x: fx.Node) -> Step | None:
    return max_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)


def average_pool(
    context: Context,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Step | None:
    if not context.is_spatial(x):
        return None
    area = window(kernel_size, kernel_size if stride is None else stride, padding)
    return Step("average_pool", node, [x], window=area | {"flag": int(count_include_pad), "argument": divisor_override or 0})


def average_pool_module(context: Context, node: fx.Node, m: nn.AvgPool2d, x: fx.Node) -> Step | None:
    return average_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


def adaptive_average_pool(context: Context, node: fx.Node, x: fx.Node, output_size: Any = None) -> Step | None:
    out, shape = context.shape(node), context.shape(x)
    if not context.is_spatial(x) or out is None or shape is None:
        return None
    if out[2:] == (1, 1):
        return Step("mean", node, [x])
    if shape[2] % out[2] or shape[3] % out[3]:  # windows of unequal size
        return None
    size = shape[2] // out[2], shape[3] // out[3]
    return Step("average_pool", node, [x], window=window(size, size) | {"flag": 1, "argument": 0})


def mean(context: Context, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> Step | None:
    if not context.is_spatial(x) or not isinstance(dim, (tuple, list)) or sorted(d % 4 for d in dim) != [2, 3]:
        return None
    return Step("mean", node, [x])


def upsample(
    context: Context,
    node: fx.Node,
    x: fx.Node,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Step | None:
    shape, out = context.shape(x), context.shape(node)
    if antialias or mode not in ("nearest", "bilinear") or not context.is_spatial(x) or shape is None or out is None:
        return None
    (h, w), (oh, ow) = shape[2:], out[2:]
    factors: Sequence[float] = (oh / h, ow / w)
    if scale_factor is not None and not recompute_scale_factor:  # torch steps by 3.2 even where it makes 12 pixels of 4
        factors = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, scale_factor)
    if mode == "nearest":
        is_integer = (oh, ow) == (h * factors[0], w * factors[1]) and oh % h == 0 and ow % w == 0
        return Step("upsample", node, [x], window={"sh": oh // h, "sw": ow // w}) if is_integer else None
    if align_corners:
        ratio = [(a - 1) / (b - 1) if b > 1 else 0.0 for a, b in ((h, oh), (w, ow))]
    else:
        ratio = [1.0 / float(factor) for factor in factors]
    return Step("bilinear", node, [x], scale=np.asarray(ratio, np.float32), window={"flag": int(bool(align_corners))})


def upsample_module(context: Context, node: fx.Node, m: nn.Upsample, x: fx.Node) -> Step | None:
    return upsample(context, node, x, m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor)


# ---- elementwise operations


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


# ---- operations that only move numbers


def concatenate(context: Context, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Step | None:
    parts = list(tensors)
    if not all(context.is_map(part) for part in parts) or len({len(context.shapes[part]) for part in parts}) != 1:
        return None
    return Step("cat", node, parts) if dim % len(context.shapes[parts[0]]) == 1 else None


def same(context: Context, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Step | None:
    """The handler of what returns its input, such as dropout."""
    if context.shape(x) is None or context.shape(x) != context.shape(node) or not (x in context.rows or is_map(context.shape(x))):
        return None
    return Step("alias", node, [x], x in context.rows)


def dropout(
    context: Context, node: fx.Node, input: fx.Node, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Step | None:
    return None if training else same(context, node, input)


def reshape(context: Context, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Step | None:
    """Flattening a map with one pixel, or adding the axes of such a pixel, moves nothing."""
    before, after = context.shape(x), context.shape(node)
    if before is None or after is None or not context.is_map(x) or not is_map(after):
        return None
    padded = [(*shape, 1, 1)[:4] for shape in (before, after)]
    return Step("alias", node, [x]) if padded[0] == padded[1] else None


def of_module(handler: Handler) -> Handler:
    """The handler of a module whose settings do not matter."""
    return lambda context, node, module, x: handler(context, node, x)


RELU, RELU6 = Activation("clamp", 0.0), Activation("clamp", 0.0, 6.0)
SILU, SIGMOID = Activation("silu"), Activation("sigmoid")
HARDSWISH, HARDSIGMOID = Activation("hardswish"), Activation("hardsigmoid")

MODULES: dict[type[nn.Module], Handler] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm1d: batch_norm,
    nn.MaxPool2d: max_pool_module,
    nn.AvgPool2d: average_pool_module,
    nn.AdaptiveAvgPool2d: of_module(adaptive_average_pool),
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
    nn.GELU: unary_module(lambda m: Activation("gelu") if m.approximate == "none" else None),
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
    F.hardtanh: hardtanh,
    torch.clamp: clamp,
    F.dropout: dropout,
    F.max_pool2d: max_pool,
    F.avg_pool2d: average_pool,
    F.adaptive_avg_pool2d: adaptive_average_pool,
    torch.mean: mean,
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
}

METHODS: dict[str, Handler] = {
    "relu": unary(RELU),
    "relu_": unary(RELU),
    "sigmoid": unary(SIGMOID),
    "clamp": clamp,
    "mean": mean,
    "flatten": reshape,
    "view": reshape,
    "reshape": reshape,
    "squeeze": reshape,
    "add": binary("add"),
    "add_": binary("add"),
    "mul": binary("multiply"),
    "contiguous": same,
}
