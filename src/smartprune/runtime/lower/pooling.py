"""Handlers of pooling and upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import fx, nn

from .context import Context, on_rows, window
from .one_dimension import size_of_map
from .steps import Shape, Step


def _on_axes(context: Context, x: fx.Node, *settings: Any) -> list[Any]:
    """Kernel, stride, padding and dilation of a pooling; those of sequences for maps with one row."""
    if x not in context.maps:
        return list(settings)
    pairs = (value if isinstance(value, (tuple, list)) else (value,) for value in settings)
    return [on_rows(value, int(place != 2)) for place, value in enumerate(pairs)]


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
    area = window(*_on_axes(context, x, kernel_size, kernel_size if stride is None else stride, padding, dilation))
    return Step("max_pool", node, [x], window=area)


def max_pool_module(context: Context, node: fx.Node, m: nn.MaxPool1d | nn.MaxPool2d, x: fx.Node) -> Step | None:
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
    area = window(*_on_axes(context, x, kernel_size, kernel_size if stride is None else stride, padding))
    return Step("average_pool", node, [x], window=area | {"flag": int(count_include_pad), "argument": divisor_override or 0})


def average_pool_of_sequences(context: Context, node: fx.Node, m: nn.AvgPool1d, x: fx.Node) -> Step | None:
    return average_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad)


def average_pool_module(context: Context, node: fx.Node, m: nn.AvgPool2d, x: fx.Node) -> Step | None:
    return average_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


def adaptive_average_pool(context: Context, node: fx.Node, x: fx.Node, output_size: Any = None) -> Step | None:
    out, shape = context.shape(node), context.shape(x)
    if not context.is_spatial(x) or out is None or shape is None:
        return None
    size = _equal_windows(shape, out)
    if size is None:
        return None
    if max(out[2:]) == 1:
        return Step("mean", node, [x])
    return Step("average_pool", node, [x], window=window(size, size) | {"flag": 1, "argument": 0})


def adaptive_max_pool(
    context: Context, node: fx.Node, x: fx.Node, output_size: Any = None, return_indices: bool = False
) -> Step | None:
    if return_indices:
        return None
    out, shape = context.shape(node), context.shape(x)
    size = None if not context.is_spatial(x) or out is None or shape is None else _equal_windows(shape, out)
    return None if size is None else Step("max_pool", node, [x], window=window(size, size))


def _equal_windows(shape: Shape, out: Shape) -> tuple[int, int] | None:
    """The size of the windows of an adaptive pooling; None if they differ in size."""
    (*_, h, w), (*_, oh, ow) = size_of_map(shape), size_of_map(out)
    return None if h % oh or w % ow else (h // oh, w // ow)


def largest(context: Context, node: fx.Node, x: fx.Node, dim: Any = (), keepdim: bool = False) -> Step | None:
    shape = context.shape(x)
    if shape is None or not context.is_spatial(x) or not _are_pixels(shape, dim):
        return None
    size = (1, *shape[2:])[-2:]
    return Step("max_pool", node, [x], window=window(size, size))


def _are_pixels(shape: Shape, dim: Any) -> bool:
    axes = dim if isinstance(dim, (tuple, list)) else [dim]
    return all(isinstance(d, int) for d in axes) and sorted(d % len(shape) for d in axes) == list(range(2, len(shape)))


def mean(context: Context, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> Step | None:
    shape = context.shape(x)
    if shape is None or not context.is_spatial(x) or not _are_pixels(shape, dim):
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
    if (
        antialias
        or mode not in ("nearest", "bilinear")
        or not context.is_spatial(x)
        or shape is None
        or out is None
        or len(shape) < 4
    ):
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
