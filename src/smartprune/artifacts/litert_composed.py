"""Operations of torch that LiteRT computes as several of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .litert_graph import Handle, Net, unsupported
from .litert_ops import add, concatenate, layer_norm, multiply, pad, permute, reflect, relu, subtract, take, unary, view


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
    "prelu": prelu,
    "softplus": softplus,
    "mish": mish,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "pad": pad_by_mode,
}
