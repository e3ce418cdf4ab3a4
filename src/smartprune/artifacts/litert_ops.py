"""Activations, arithmetic, and operations that move data, in LiteRT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from .litert_graph import FUSED, NHWC, RELU, RELU6, Handle, Net, Operand, Value, array_of, f32, plain_order, unsupported
from .litert_layers import NO_ACTIVATION, matmul

TABLES = {"LEAKY_RELU": "LeakyReluOptions", "GELU": "GeluOptions", "HARD_SWISH": "HardSwishOptions", "EXP": "ExpOptions"}
TABLES |= {"NEG": "NegOptions", "ABS": "AbsOptions", "SQUARE": "SquareOptions"}
NOT_NEGATIVE = (RELU, RELU6, "LOGISTIC", "SOFTMAX", "EXP", "SQUARE", "ABS", "SQRT")


def unary(code: str, net: Net, x: Handle, **options: Any) -> Handle:
    out = net.add(code, [x.value], x.value.shape, TABLES.get(code, ""), **options)
    out.not_negative = code in NOT_NEGATIVE
    return Handle(out, x.order)


def same(net: Net, x: Handle, *rest: Any, **settings: Any) -> Handle:
    """Copies, and operations that do nothing in eval mode."""
    dtype = settings.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise unsupported(net.node, f"a conversion to {str(dtype).removeprefix('torch.')}", "compute in floating point")
    return x


def nothing(net: Net, *rest: Any, **settings: Any) -> None:
    """Checks that torch writes into graphs, which compute nothing."""


def activation(code: str, net: Net, x: Handle) -> Handle:
    """Part of the operation before it if nothing else reads that operation."""
    before = net.maker(x)
    if before is not None and before.code in FUSED and before.activation == NO_ACTIVATION:
        before.options["fusedActivationFunction"] = code
        x.value.not_negative = True
        return Handle(x.value, x.order)
    return unary(code, net, x)


def relu(net: Net, x: Handle) -> Handle:
    return x if x.value.not_negative else activation(RELU, net, x)


def clamp(net: Net, x: Handle, lowest: float | None = None, highest: float | None = None) -> Handle:
    if (lowest, highest) == (0, 6):
        return activation(RELU6, net, x)
    if lowest == 0 and highest is None:
        return relu(net, x)
    value = x.value
    for code, limit in (("MAXIMUM", lowest), ("MINIMUM", highest)):
        if limit is not None:
            value = net.add(code, [value, net.constant(f32(limit))], value.shape, "MaximumMinimumOptions")
    return Handle(value, x.order)


def silu(net: Net, x: Handle) -> Handle:
    return multiply(net, x, unary("LOGISTIC", net, x))


def hardsigmoid(net: Net, x: Handle) -> Handle:
    return multiply(net, activation(RELU6, net, add(net, x, 3.0)), 1 / 6)


def gelu(net: Net, x: Handle, *, approximate: str = "none") -> Handle:
    return unary("GELU", net, x, approximate=approximate == "tanh")


def leaky_relu(net: Net, x: Handle, slope: float = 0.01) -> Handle:
    return unary("LEAKY_RELU", net, x, alpha=float(slope))


def elu(net: Net, x: Handle, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Handle:
    if (alpha, scale, input_scale) != (1, 1, 1):
        raise unsupported(net.node, "an ELU with factors", "all factors must be 1")
    return unary("ELU", net, x)


def power(net: Net, x: Handle, exponent: float) -> Handle:
    if exponent == 2:
        return multiply(net, x, x)
    if exponent == 0.5:
        return unary("SQRT", net, x)
    raise unsupported(net.node, f"the power {exponent}", "the powers are 2 and 0.5")


def binary(code: str, net: Net, a: Operand, b: Operand) -> Handle:
    """Arithmetic with broadcasting, in the order of axes that an operand already has."""
    handles = [x for x in (a, b) if isinstance(x, Handle)]
    rank = max(len(x.order) if isinstance(x, Handle) else (x.dim() if isinstance(x, Tensor) else 0) for x in (a, b))
    orders = [x.order for x in handles if len(x.order) == rank]
    order = max(orders, key=lambda order: order != plain_order(rank), default=plain_order(rank))
    left, right = (_operand(net, x, order) for x in (a, b))
    shape = np.broadcast_shapes(left.shape, right.shape)
    out = net.add(code, [left, right], shape, f"{code.title()}Options", fusedActivationFunction=NO_ACTIVATION)
    out.not_negative = code in ("ADD", "MUL", "DIV") and left.not_negative and right.not_negative
    return Handle(out, order)


def _operand(net: Net, x: Operand, order: tuple[int, ...]) -> Value:
    rank = len(order)
    if isinstance(x, Handle):
        if len(x.order) < rank:
            value = net.plain(x)
            shape = (1,) * (rank - len(value.shape)) + value.shape
            x = Handle(net.reshape(value, shape), plain_order(rank))
        return net.permute(x, order)
    array = array_of(x)
    array = array.astype(np.float32) if array.dtype != np.float32 else array
    if array.size > 1:
        array = array.reshape((1,) * (rank - array.ndim) + array.shape).transpose(order)
    out = net.constant(array.reshape(1) if array.size == 1 else array)
    out.not_negative = bool((array >= 0).all())
    return out


def add(net: Net, a: Operand, b: Operand, *, alpha: float = 1) -> Handle:
    return binary("ADD", net, a, b if alpha == 1 else _times(net, b, alpha))


def subtract(net: Net, a: Operand, b: Operand, *, alpha: float = 1) -> Handle:
    return binary("SUB", net, a, b if alpha == 1 else _times(net, b, alpha))


def subtract_from(net: Net, a: Operand, b: Operand, alpha: float = 1) -> Handle:
    return subtract(net, b, a, alpha=alpha)


def _times(net: Net, x: Operand, factor: float) -> Operand:
    return multiply(net, x, factor) if isinstance(x, Handle) else x * factor


multiply = partial(binary, "MUL")
divide = partial(binary, "DIV")


def softmax(net: Net, x: Handle, dim: int, *rest: Any) -> Handle:
    dim %= len(x.order)
    order = (*(axis for axis in x.order if axis != dim), dim)
    value = net.permute(x, order)
    out = net.add("SOFTMAX", [value], value.shape, "SoftmaxOptions", beta=1.0)
    out.not_negative = True
    return Handle(out, order)


def mean(net: Net, x: Handle, dims: Sequence[int] | None = None, keepdim: bool = False, **settings: Any) -> Handle:
    return reduce("MEAN", net, x, dims, keepdim)


def total(net: Net, x: Handle, dims: Sequence[int] | None = None, keepdim: bool = False, **settings: Any) -> Handle:
    return reduce("SUM", net, x, dims, keepdim)


def largest(net: Net, x: Handle, dims: Sequence[int] = (), keepdim: bool = False) -> Handle:
    return reduce("REDUCE_MAX", net, x, dims, keepdim)


def reduce(code: str, net: Net, x: Handle, dims: Sequence[int] | None, keepdim: bool) -> Handle:
    rank = len(x.order)
    removed = {dim % rank for dim in dims} if dims else set(range(rank))
    places = sorted(x.order.index(dim) for dim in removed)
    shape = [1 if place in places else size for place, size in enumerate(x.value.shape)]
    if keepdim:
        order = x.order
    else:
        shape = [size for place, size in enumerate(shape) if place not in places]
        order = _without(x.order, removed)
    out = net.add(code, [x.value, net.integers(*places)], shape, "ReducerOptions", keepDims=keepdim)
    out.not_negative = x.value.not_negative
    return Handle(out, order)


def _without(order: tuple[int, ...], removed: set[int]) -> tuple[int, ...]:
    """The order of the axes that are left, renumbered."""
    left = sorted(set(order) - removed)
    return tuple(left.index(axis) for axis in order if axis not in removed)


def permute(net: Net, x: Handle, dims: Sequence[int]) -> Handle:
    dims = [dim % len(x.order) for dim in dims]
    return Handle(x.value, tuple(dims.index(axis) for axis in x.order), x.alone)


def transpose(net: Net, x: Handle, a: int, b: int) -> Handle:
    dims = list(range(len(x.order)))
    dims[a], dims[b] = dims[b], dims[a]
    return permute(net, x, dims)


def transpose_matrix(net: Net, x: Handle) -> Handle:
    return transpose(net, x, 0, -1)


def view(net: Net, x: Handle, shape: Sequence[int]) -> Handle:
    sizes = [int(n) for n in shape]
    if -1 in sizes:
        sizes[sizes.index(-1)] = math.prod(x.shape) // max(-math.prod(sizes), 1)
    return Handle(net.reshape(net.plain(x), sizes), plain_order(len(sizes)))


def flatten(net: Net, x: Handle, start: int = 0, end: int = -1) -> Handle:
    shape, rank = x.shape, len(x.order)
    start, end = start % rank, end % rank
    return view(net, x, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def unsqueeze(net: Net, x: Handle, dim: int) -> Handle:
    shape = list(x.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return view(net, x, shape)


def squeeze(net: Net, x: Handle, dims: int | Sequence[int] | None = None) -> Handle:
    rank = len(x.order)
    chosen = range(rank) if dims is None else {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    removed = {dim for dim in chosen if x.shape[dim] == 1}
    shape = [size for place, size in enumerate(x.value.shape) if x.order[place] not in removed]
    return Handle(net.reshape(x.value, shape), _without(x.order, removed))


def expand(net: Net, x: Handle, shape: Sequence[int], **settings: Any) -> Handle:
    value = net.plain(x)
    old = (1,) * (len(shape) - len(value.shape)) + value.shape
    sizes = [a if n == -1 else int(n) for a, n in zip(old, shape, strict=True)]
    if list(value.shape) == sizes:
        return x
    value = net.reshape(value, old)
    return Handle(net.add("BROADCAST_TO", [value, net.integers(*sizes)], sizes, "BroadcastToOptions"), plain_order(len(sizes)))


def concatenate(net: Net, tensors: Sequence[Operand], dim: int = 0) -> Handle:
    handles = [x for x in tensors if isinstance(x, Handle)]
    rank = len(handles[0].order)
    order = max((x.order for x in handles), key=lambda order: order != plain_order(rank))
    values = [_operand(net, x, order) for x in tensors]
    axis = order.index(dim % rank)
    shape = list(values[0].shape)
    shape[axis] = sum(value.shape[axis] for value in values)
    out = net.add("CONCATENATION", values, shape, "ConcatenationOptions", axis=axis, fusedActivationFunction=NO_ACTIVATION)
    out.not_negative = all(value.not_negative for value in values)
    return Handle(out, order)


def stack(net: Net, tensors: Sequence[Handle], dim: int = 0) -> Handle:
    dim %= len(tensors[0].order) + 1
    return concatenate(net, [unsqueeze(net, x, dim) for x in tensors], dim)


def take(net: Net, x: Handle, dim: int, start: int, stop: int, step: int = 1) -> Handle:
    """Positions ``start`` to ``stop`` of an axis."""
    place, shape = x.order.index(dim), list(x.value.shape)
    begin, end = [0] * len(shape), list(shape)
    begin[place], end[place] = start, stop
    shape[place] = len(range(start, stop, step))
    if tuple(shape) == x.value.shape:
        return x
    if step == 1:
        out = net.add("SLICE", [x.value, net.integers(*begin), net.integers(*shape)], shape, "SliceOptions")
    else:
        steps = [step if i == place else 1 for i in range(len(shape))]
        lists = [net.integers(*numbers) for numbers in (begin, end, steps)]
        out = net.add("STRIDED_SLICE", [x.value, *lists], shape, "StridedSliceOptions")
    out.not_negative = x.value.not_negative
    return Handle(out, x.order)


def cut(net: Net, x: Handle, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Handle:
    dim %= len(x.order)
    first, last, _ = slice(start, end, step).indices(x.shape[dim])
    return take(net, x, dim, first, last, step)


def select(net: Net, x: Handle, dim: int, index: int) -> Handle:
    dim %= len(x.order)
    index %= x.shape[dim]
    return squeeze(net, take(net, x, dim, index, index + 1), dim)


def split(net: Net, x: Handle, sizes: int | Sequence[int], dim: int = 0) -> list[Handle]:
    dim %= len(x.order)
    size = x.shape[dim]
    parts = [min(sizes, size - start) for start in range(0, size, sizes)] if isinstance(sizes, int) else list(sizes)
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [take(net, x, dim, start, start + part) for start, part in zip(starts, parts, strict=True)]


def chunk(net: Net, x: Handle, chunks: int, dim: int = 0) -> list[Handle]:
    return split(net, x, -(-x.shape[dim % len(x.order)] // chunks), dim)


def pad(net: Net, x: Handle, amounts: Sequence[int], value: float | None = 0.0) -> Handle:
    fill = float(value or 0.0)
    table, shape = _amounts(x, amounts)
    if (table < 0).any():
        raise unsupported(net.node, "padding by a negative number", "slice the tensor")
    extra = [] if fill == 0.0 else [net.constant(f32(fill))]
    code, options = ("PADV2", "PadV2Options") if extra else ("PAD", "PadOptions")
    out = net.add(code, [x.value, net.constant(table), *extra], shape, options)
    out.not_negative = x.value.not_negative and fill >= 0
    return Handle(out, x.order)


def reflect(net: Net, x: Handle, amounts: Sequence[int]) -> Handle:
    table, shape = _amounts(x, amounts)
    return Handle(net.add("MIRROR_PAD", [x.value, net.constant(table)], shape, "MirrorPadOptions", mode="REFLECT"), x.order)


def _amounts(x: Handle, amounts: Sequence[int]) -> tuple[Any, list[int]]:
    rank = len(x.order)
    by_axis = [(0, 0)] * rank
    for i in range(len(amounts) // 2):
        by_axis[rank - 1 - i] = (int(amounts[2 * i]), int(amounts[2 * i + 1]))
    table = np.array([by_axis[axis] for axis in x.order], np.int32)
    return table, [size + int(row.sum()) for size, row in zip(x.value.shape, table, strict=True)]


def resize(code: str, net: Net, x: Handle, size: Any = None, *rest: Any) -> Handle:
    """``rest`` ends with the factors, and for bilinear begins with align_corners."""
    align = bool(rest[0]) if code == "RESIZE_BILINEAR" else False
    factors = [x for x in rest[-1:] if isinstance(x, Sequence)] if size is None else []
    height, width = size if size is not None else [int(n * f) for n, f in zip(x.shape[2:], factors[0], strict=True)]
    if size is None and any(int(n * f) != n * f for n, f in zip(x.shape[2:], factors[0], strict=True)):
        raise unsupported(net.node, f"resizing by {factors[0]}", "give size= in place of scale_factor=")
    image = net.permute(x, NHWC)
    shape = (image.shape[0], int(height), int(width), image.shape[3])
    table = "ResizeBilinearOptions" if code == "RESIZE_BILINEAR" else "ResizeNearestNeighborOptions"
    half = code == "RESIZE_BILINEAR" and not align
    inputs = [image, net.integers(int(height), int(width))]
    out = net.add(code, inputs, shape, table, alignCorners=align, halfPixelCenters=half)
    out.not_negative = image.not_negative
    return Handle(out, NHWC)


def layer_norm(
    net: Net, x: Handle, size: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any
) -> Handle:
    dims = list(range(-len(size), 0))
    centred = subtract(net, x, mean(net, x, dims, True))
    variance = mean(net, multiply(net, centred, centred), dims, True)
    out = multiply(net, centred, unary("RSQRT", net, add(net, variance, eps)))
    out = out if weight is None else multiply(net, out, weight)
    return out if bias is None else add(net, out, bias)


def attention(
    net: Net, q: Handle, k: Handle, v: Handle, mask: Any = None, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Handle:  # fmt: skip
    if mask is not None or causal or enable_gqa:
        raise unsupported(net.node, "attention with a mask or shared heads", "export a model without them")
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return matmul(net, softmax(net, multiply(net, matmul(net, q, transpose(net, k, -2, -1)), factor), -1), v)


RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("clone", "contiguous", "detach", "alias", "dropout", "lift_fresh_copy", "_to_copy", "to.dtype"), same),
    "_assert_tensor_metadata": nothing,
    "relu": relu, "relu6": partial(activation, RELU6), "hardtanh": clamp, "clamp": clamp, "clamp_min": clamp,
    "silu": silu, "hardswish": partial(unary, "HARD_SWISH"), "hardsigmoid": hardsigmoid, "gelu": gelu,
    "leaky_relu": leaky_relu, "elu": elu, "sigmoid": partial(unary, "LOGISTIC"), "tanh": partial(unary, "TANH"),
    "exp": partial(unary, "EXP"), "sqrt": partial(unary, "SQRT"), "rsqrt": partial(unary, "RSQRT"), "neg": partial(unary, "NEG"),
    "abs": partial(unary, "ABS"), "pow.Tensor_Scalar": power, "add": add, "sub": subtract, "rsub": subtract_from,
    "mul": multiply, "div": divide, "softmax": softmax, "_softmax": softmax, "mean": mean, "sum": total, "amax": largest,
    "permute": permute, "transpose": transpose, "t": transpose_matrix, "view": view, "reshape": view, "_unsafe_view": view,
    "flatten": flatten, "unsqueeze": unsqueeze, "squeeze": squeeze, "expand": expand, "cat": concatenate, "stack": stack,
    "slice": cut, "select": select, "split": split, "split_with_sizes": split, "chunk": chunk,
    "constant_pad_nd": pad, "reflection_pad2d": reflect,
    "upsample_nearest2d": partial(resize, "RESIZE_NEAREST_NEIGHBOR"), "upsample_bilinear2d": partial(resize, "RESIZE_BILINEAR"),
    "layer_norm": layer_norm, "scaled_dot_product_attention": attention,
}  # fmt: skip
