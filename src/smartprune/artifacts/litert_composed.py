"""Operations of torch that LiteRT computes as several of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .litert_graph import Handle, Net, unsupported
from .litert_layers import RULES as LAYERS
from .litert_ops import (
    add,
    concatenate,
    elu,
    largest,
    layer_norm,
    mean,
    multiply,
    pad,
    permute,
    reflect,
    relu,
    select,
    squeeze,
    subtract,
    take,
    total,
    unary,
    unsqueeze,
    view,
)


def negative(net: Net, x: Handle) -> Handle:
    return unary("NEG", net, x)


def prelu(net: Net, x: Handle, slope: Tensor) -> Handle:
    """The positive part, minus the negative part times the slope of its channel."""
    shape = (1, -1, *[1] * (len(x.order) - 2)) if len(x.order) > 1 else (-1,)
    below = multiply(net, relu(net, negative(net, x)), slope.reshape(shape))
    return subtract(net, unary("RELU", net, x), below)


def softplus(net: Net, x: Handle, beta: float = 1, threshold: float = 20) -> Handle:
    """``max(x, 0) + log(1 + exp(-|x|))``, in which no number becomes infinite."""
    scaled = x if beta == 1 else multiply(net, x, beta)
    small = unary("LOG", net, add(net, unary("EXP", net, negative(net, unary("ABS", net, scaled))), 1.0))
    out = add(net, unary("RELU", net, scaled), small)
    return out if beta == 1 else multiply(net, out, 1 / beta)


def mish(net: Net, x: Handle) -> Handle:
    return multiply(net, x, unary("TANH", net, softplus(net, x)))


def selu(net: Net, x: Handle) -> Handle:
    factor, alpha = 1.0507009873554805, 1.6732632423543772  # of the definition of SELU
    return multiply(net, add(net, unary("RELU", net, x), multiply(net, _below_zero(net, x), alpha)), factor)


def celu(net: Net, x: Handle, alpha: float = 1.0) -> Handle:
    return multiply(net, elu(net, multiply(net, x, 1 / alpha)), alpha)


def _below_zero(net: Net, x: Handle) -> Handle:
    """``exp(min(x, 0)) - 1``"""
    return elu(net, negative(net, relu(net, negative(net, x))))


def log_softmax(net: Net, x: Handle, dim: int, *rest: Any) -> Handle:
    """``x - max - log(sum(exp(x - max)))``, in which no number becomes infinite."""
    shifted = subtract(net, x, largest(net, x, [dim], True))
    return subtract(net, shifted, unary("LOG", net, total(net, unary("EXP", net, shifted), [dim], True)))


def vector_norm(
    net: Net, x: Handle, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False, **settings: Any
) -> Handle:
    if order == 2:
        return unary("SQRT", net, total(net, multiply(net, x, x), dims, keepdim))
    if order in (1, math.inf):
        return (total if order == 1 else largest)(net, unary("ABS", net, x), dims or (), keepdim)
    raise unsupported(net.node, f"a norm of order {order}", "the orders are 1, 2 and inf")


def rms_norm(net: Net, x: Handle, size: Sequence[int], weight: Any = None, eps: float | None = None) -> Handle:
    epsilon = 1.1920928955078125e-07 if eps is None else eps  # of float32, as in torch
    squares = mean(net, multiply(net, x, x), list(range(-len(size), 0)), True)
    out = multiply(net, x, unary("RSQRT", net, add(net, squares, epsilon)))
    return out if weight is None else multiply(net, out, weight)


def unbind(net: Net, x: Handle, dim: int = 0) -> list[Handle]:
    return [select(net, x, dim, index) for index in range(x.shape[dim % len(x.order)])]


def smallest(net: Net, x: Handle, dims: Sequence[int] = (), keepdim: bool = False) -> Handle:
    return negative(net, largest(net, negative(net, x), dims, keepdim))


def largest_of_axis(net: Net, x: Handle, dim: int, keepdim: bool = False) -> tuple[Handle]:
    """The values alone, without their places."""
    return (largest(net, x, [dim], keepdim),)


def smallest_of_axis(net: Net, x: Handle, dim: int, keepdim: bool = False) -> tuple[Handle]:
    return (smallest(net, x, [dim], keepdim),)


def pool_of_one_axis(name: str, net: Net, x: Handle, *settings: Any) -> Handle:
    """A pooling of signals, as one of images that are one pixel high."""
    wide = [[1, *part] if len(part) == 1 else list(part) for part in settings[:1]]
    for i, part in enumerate(settings[1:], 1):
        zero_or_one = 0 if i == 2 else 1  # the padding
        wide.append([zero_or_one, *part] if isinstance(part, (list, tuple)) and len(part) == 1 else part)
    return squeeze(net, LAYERS[name](net, unsqueeze(net, x, 2), *wide), 2)


def pixel_shuffle(net: Net, x: Handle, factor: int) -> Handle:
    batch, channels, height, width = x.shape
    channels //= factor**2
    parts = view(net, x, (batch * channels, factor, factor, height, width))
    return view(net, permute(net, parts, (0, 3, 1, 4, 2)), (batch, channels, height * factor, width * factor))


def pixel_unshuffle(net: Net, x: Handle, factor: int) -> Handle:
    batch, channels, height, width = x.shape
    height, width = height // factor, width // factor
    parts = view(net, x, (batch * channels, height, factor, width, factor))
    return view(net, permute(net, parts, (0, 2, 4, 1, 3)), (batch, channels * factor**2, height, width))


def group_norm(
    net: Net, x: Handle, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *rest: Any
) -> Handle:
    """A layer norm over each group, and a factor and an offset per channel."""
    shape = x.shape
    parts = view(net, x, (shape[0], groups, -1))
    out = view(net, layer_norm(net, parts, parts.shape[2:], eps=eps), shape)
    per_channel = (1, -1, *[1] * (len(shape) - 2))
    out = out if weight is None else multiply(net, out, weight.reshape(per_channel))
    return out if bias is None else add(net, out, bias.reshape(per_channel))


def instance_norm(net: Net, x: Handle, weight: Any, bias: Any, mean: Any, var: Any, per_sample: bool, *rest: Any) -> Handle:
    if not per_sample:
        raise unsupported(net.node, "an instance normalization with stored statistics", "use a batch normalization")
    return group_norm(net, x, x.shape[1], weight, bias, rest[1])


def pad_by_mode(net: Net, x: Handle, amounts: Sequence[int], mode: str = "constant", value: float | None = None) -> Handle:
    if mode == "constant":
        return pad(net, x, amounts, value)
    return reflect(net, x, amounts) if mode == "reflect" else _pad_by_parts(net, x, amounts, mode == "circular")


def _pad_by_parts(net: Net, x: Handle, amounts: Sequence[int], circular: bool) -> Handle:
    """Joins each padded axis from parts: copies of its ends, or the positions of the other end."""
    for i in range(len(amounts) // 2):
        dim = len(x.order) - 1 - i
        size, (before, after) = x.shape[dim], amounts[2 * i : 2 * i + 2]
        if min(before, after) < 0:
            raise unsupported(net.node, "padding by a negative number", "slice the tensor")
        if circular:
            first, last = [take(net, x, dim, size - before, size)] * (before > 0), [take(net, x, dim, 0, after)] * (after > 0)
        else:
            first, last = [take(net, x, dim, 0, 1)] * before, [take(net, x, dim, size - 1, size)] * after
        if first or last:
            x = concatenate(net, [*first, x, *last], dim)
    return x


RULES: dict[str, Callable[..., Any]] = {
    **{f"{name}1d": partial(pool_of_one_axis, f"{name}2d") for name in ("max_pool", "avg_pool", "adaptive_avg_pool")},
    "prelu": prelu,
    "selu": selu,
    "celu": celu,
    "log_softmax": log_softmax,
    "_log_softmax": log_softmax,
    "linalg_vector_norm": vector_norm,
    "rms_norm": rms_norm,
    "unbind": unbind,
    "max.dim": largest_of_axis,
    "min.dim": smallest_of_axis,
    "amin": smallest,
    "log": partial(unary, "LOG"),
    "softplus": softplus,
    "mish": mish,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "pad": pad_by_mode,
}
