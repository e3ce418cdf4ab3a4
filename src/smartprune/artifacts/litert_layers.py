"""Convolutions, linear layers, normalization and pooling in LiteRT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .litert_graph import NHWC, Handle, Net, Value, array_of, f32, plain_order, unsupported

NO_ACTIVATION = "NONE"
LOWEST = float(np.finfo(np.float32).min)
Pads = Sequence[tuple[int, int]]  # before and after, by axis: height, width


def pair(numbers: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(numbers, int):
        return numbers, numbers
    return (numbers[0], numbers[-1])


def is_same(pads: Pads, sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether the padding called SAME adds exactly these rows and columns."""
    for (before, after), size, k, s, d in zip(pads, sizes, kernel, stride, dilation, strict=True):
        total = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
        if (before, after) != (total // 2, total - total // 2):
            return False
    return True


def pad_image(net: Net, x: Value, pads: Pads, fill: float = 0.0) -> Value:
    """Adds rows and columns to an image in NHWC."""
    if not any(map(any, pads)):
        return x
    amounts = np.array([(0, 0), *pads, (0, 0)], np.int32)
    shape = [size + int(a) + int(b) for size, (a, b) in zip(x.shape, amounts, strict=True)]
    if fill == 0.0:
        out = net.add("PAD", [x, net.constant(amounts)], shape, "PadOptions")
    else:
        out = net.add("PADV2", [x, net.constant(amounts), net.constant(f32(fill))], shape, "PadV2Options")
    out.not_negative = x.not_negative and fill >= 0
    return out


def _output_size(size: int, k: int, s: int, d: int) -> int:
    return (size - (k - 1) * d - 1) // s + 1


def convolution(
    net: Net,
    x: Handle,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Handle:
    if not isinstance(weight, Tensor) or weight.dim() not in (3, 4):
        raise unsupported(net.node, "this convolution", "the weight must be a constant of a 1-D or 2-D convolution")
    line = weight.dim() == 3  # a 1-D convolution is one over images with one row
    rank = weight.dim()
    if len(x.order) != rank:
        raise unsupported(net.node, "a convolution of an input without a batch axis", "add a batch axis to the example")
    image = net.permute(x, (0, 2, 1) if line else NHWC)
    if line:
        image = net.reshape(image, (image.shape[0], 1, *image.shape[1:]))
    kernel = array_of(weight)[:, :, None] if line else array_of(weight)
    (sh, sw), (dh, dw) = ((1, stride[-1]), (1, dilation[-1])) if line else (pair(stride), pair(dilation))
    pads = _conv_pads(padding, kernel.shape[2:], (dh, dw), line)
    kernel = kernel.transpose(0, 2, 3, 1)
    size, window = image.shape[1:3], kernel.shape[1:3]
    same = is_same(pads, size, window, (sh, sw), (dh, dw))
    if not same:
        image = pad_image(net, image, pads)
    sums = [n + a + b for n, (a, b) in zip(size, pads, strict=True)]
    shape = [image.shape[0], *(_output_size(*parts) for parts in zip(sums, window, (sh, sw), (dh, dw), strict=True)), len(kernel)]
    options: dict[str, Any] = {
        "padding": "SAME" if same and any(map(any, pads)) else "VALID",
        "strideH": sh, "strideW": sw, "dilationHFactor": dh, "dilationWFactor": dw, "fusedActivationFunction": NO_ACTIVATION,
    }  # fmt: skip
    depthwise = groups > 1 and groups == x.shape[1]
    name = net.names.get(id(weight), "")
    if depthwise:
        options["depthMultiplier"] = len(kernel) // groups
        kernel = kernel.transpose(3, 1, 2, 0)
    stored = net.constant(kernel, name)
    if name:
        net.shapes[name] = tuple(weight.shape)
    numbers = net.constant(np.zeros(shape[-1], np.float32) if bias is None else array_of(bias))
    code, table = ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions") if depthwise else ("CONV_2D", "Conv2DOptions")
    out = net.add(code, [image, stored, numbers], shape, table, **options)
    return _as_line(net, out) if line else Handle(out, NHWC)


def _as_line(net: Net, image: Value) -> Handle:
    return Handle(net.reshape(image, (image.shape[0], *image.shape[2:])), (0, 2, 1))


def _conv_pads(padding: Sequence[int] | str, window: Sequence[int], dilation: Sequence[int], line: bool) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        totals = [(k - 1) * d if padding == "same" else 0 for k, d in zip(window, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    ph, pw = (0, padding[-1]) if line else pair(padding)
    return [(ph, ph), (pw, pw)]


def transposed_convolution(
    net: Net,
    x: Handle,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Handle:
    if not isinstance(weight, Tensor) or weight.dim() != 4 or groups != 1 or pair(dilation) != (1, 1):
        raise unsupported(net.node, "this transposed convolution", "it must be 2-D, with one group and without dilation")
    image, kernel = net.permute(x, NHWC), array_of(weight).transpose(1, 2, 3, 0)
    steps, borders, extra, window = pair(stride), pair(padding), pair(output_padding), kernel.shape[1:3]
    full = [(n - 1) * s + k for n, s, k in zip(image.shape[1:3], steps, window, strict=True)]
    wanted = [n - 2 * p + e for n, p, e in zip(full, borders, extra, strict=True)]
    name = net.names.get(id(weight), "")
    if name:
        net.shapes[name] = tuple(weight.shape)
    numbers = net.constant(np.zeros(len(kernel), np.float32) if bias is None else array_of(bias))
    shape = (image.shape[0], *full, len(kernel))
    beyond = [max(p + w - n, 0) for p, w, n in zip(borders, wanted, full, strict=True)]
    late_bias = any(beyond)  # rows beyond the full output hold the bias alone
    out = net.add(
        "TRANSPOSE_CONV",
        [net.integers(*shape), net.constant(kernel, name), image, *([] if late_bias else [numbers])],
        shape,
        "TransposeConvOptions",
        "float32",
        padding="VALID",
        strideH=steps[0],
        strideW=steps[1],
    )
    out = pad_image(net, out, [(0, n) for n in beyond])
    if wanted != list(out.shape[1:3]):
        size = (image.shape[0], *wanted, len(kernel))
        out = net.add("SLICE", [out, net.integers(0, *borders, 0), net.integers(*size)], size, "SliceOptions")
    if late_bias and bias is not None:
        out = net.add("ADD", [out, numbers], out.shape, "AddOptions", fusedActivationFunction=NO_ACTIVATION)
    return Handle(out, NHWC)


def linear(net: Net, x: Handle, weight: Tensor, bias: Tensor | None = None) -> Handle:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise unsupported(net.node, "a product with a weight that is computed", "the weight must be a constant matrix")
    value, name = net.plain(x), net.names.get(id(weight), "")
    if name:
        net.shapes[name] = tuple(weight.shape)
    numbers = net.constant(np.zeros(len(weight), np.float32) if bias is None else array_of(bias))
    flat = value if len(value.shape) > 1 else net.reshape(value, (1, *value.shape))
    out = net.add(
        "FULLY_CONNECTED",
        [flat, net.constant(array_of(weight), name), numbers],
        (*flat.shape[:-1], len(weight)),
        "FullyConnectedOptions",
        keepNumDims=len(flat.shape) > 2,
        fusedActivationFunction=NO_ACTIVATION,
    )
    out = out if len(value.shape) > 1 else net.reshape(out, (len(weight),))
    return Handle(out, plain_order(len(out.shape)))


def addmm(net: Net, bias: Tensor, x: Handle, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Handle:
    if not isinstance(bias, Tensor) or not isinstance(weight, Tensor) or bias.dim() != 1 or beta != 1 or alpha != 1:
        raise unsupported(net.node, "this addmm", "the matrix and the bias must be constants, and the factors 1")
    return linear(net, x, _turned(net, weight), bias)


def _turned(net: Net, weight: Tensor) -> Tensor:
    """A matrix that torch stores as (in, out), as linear layers store it. It keeps its name."""
    turned = weight.t().contiguous()
    net.keep.append(turned)
    net.names[id(turned)] = net.names.get(id(weight), "")
    return turned


def matmul(net: Net, a: Handle | Tensor, b: Handle | Tensor) -> Handle:
    if isinstance(a, Handle) and isinstance(b, Tensor) and b.dim() == 2:
        return linear(net, a, _turned(net, b))
    left, right = net.tensor_of(a), net.tensor_of(b)
    if min(len(left.shape), len(right.shape)) < 2:
        raise unsupported(net.node, "a product with a vector", "both tensors must have two axes or more")
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    out = net.add("BATCH_MATMUL", [left, right], shape, "BatchMatMulOptions", adjX=False, adjY=False)
    return Handle(out, plain_order(len(shape)))


def batch_norm(
    net: Net,
    x: Handle,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *rest: Any,
    eps: float,
) -> Handle:
    """Merged into the layer before it if nothing else reads that layer, and a product and a sum otherwise."""
    if mean is None or var is None:
        raise unsupported(net.node, "a normalization without running statistics", "train with track_running_stats=True")
    scale = 1 / np.sqrt(array_of(var).astype(np.float64) + eps)
    scale = scale if weight is None else scale * array_of(weight)
    shift = -array_of(mean) * scale + (0 if bias is None else array_of(bias))
    layer = net.maker(x)
    axis = {"CONV_2D": 0, "FULLY_CONNECTED": 0, "DEPTHWISE_CONV_2D": 3}.get(layer.code if layer else "")
    if layer is not None and axis is not None and layer.activation == NO_ACTIVATION and x.order[-1] == 1:
        kernel, numbers = layer.inputs[1:3]
        assert kernel is not None
        assert numbers is not None
        shape = [1] * kernel.array.ndim
        shape[axis] = -1
        layer.inputs[1] = net.constant((kernel.array * scale.reshape(shape)).astype(np.float32), kernel.weight)
        layer.inputs[2] = net.constant((numbers.array * scale + shift).astype(np.float32))
        return Handle(x.value, x.order)
    order = NHWC if len(x.order) == 4 else x.order
    shape = [1] * len(order)
    shape[order.index(1)] = -1
    value = net.permute(x, order)
    for code, numbers in (("MUL", scale), ("ADD", shift)):
        operand = net.constant(numbers.astype(np.float32).reshape(shape))
        value = net.add(code, [value, operand], value.shape, f"{code.title()}Options", fusedActivationFunction=NO_ACTIVATION)
    return Handle(value, order)


def normalization(net: Net, x: Handle, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple[Handle]:
    return (batch_norm(net, x, weight, bias, mean, var, eps=eps),)


def normalization_in_eval(
    net: Net, x: Handle, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *rest: Any
) -> Handle:
    return batch_norm(net, x, weight, bias, mean, var, eps=eps)


def pool(
    code: str,
    net: Net,
    x: Handle,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    outside: bool = True,
) -> Handle:
    """A pooling layer. ``outside`` says whether an average counts the padding."""
    if len(x.order) != 4 or pair(dilation) != (1, 1):
        raise unsupported(net.node, "this pooling", "it must be 1-D or 2-D, with a batch axis and without dilation")
    image, window = net.permute(x, NHWC), pair(kernel)
    steps, borders = pair(stride) if stride else window, pair(padding)
    sums, pads = [], []
    for size, k, s, p in zip(image.shape[1:3], window, steps, borders, strict=True):
        count = _output_size(size + 2 * p + (s - 1 if ceil_mode else 0), k, s, 1)
        if ceil_mode and (count - 1) * s >= size + p:  # a window must start inside
            count -= 1
        sums.append(count)
        pads.append((p, p if not ceil_mode else max((count - 1) * s + k - size - p, 0)))
    maximum = code == "MAX_POOL_2D"
    same = is_same(pads, image.shape[1:3], window, steps, (1, 1)) and any(map(any, pads))
    mixed = any(after != before for before, after in pads) and not maximum and ceil_mode
    if mixed or (not maximum and not outside and any(map(any, pads)) and not same):
        raise unsupported(net.node, "an average over windows of different sizes", "leave out ceil_mode, or count the padding")
    if same and not maximum and outside:
        same = False
    if not same:
        image = pad_image(net, image, pads, LOWEST if maximum and not image.not_negative else 0.0)
    options: dict[str, Any] = {"strideH": steps[0], "strideW": steps[1], "filterHeight": window[0], "filterWidth": window[1]}
    out = net.add(
        code, [image], (image.shape[0], *sums, image.shape[3]), "Pool2DOptions", padding="SAME" if same else "VALID",
        fusedActivationFunction=NO_ACTIVATION, **options,
    )  # fmt: skip
    out.not_negative = image.not_negative
    return Handle(out, NHWC)


def max_pool(net: Net, x: Handle, *settings: Any) -> Handle:
    return pool("MAX_POOL_2D", net, x, *settings)


def max_pool_with_places(net: Net, x: Handle, *settings: Any) -> tuple[Handle]:
    return (max_pool(net, x, *settings),)


def average_pool(
    net: Net,
    x: Handle,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Handle:
    if divisor_override is not None:
        raise unsupported(net.node, "an average with divisor_override", "leave it out")
    return pool("AVERAGE_POOL_2D", net, x, kernel, stride, padding, (1,), ceil_mode, count_include_pad)


def adaptive_average_pool(net: Net, x: Handle, size: Sequence[int]) -> Handle:
    return _adaptive(net, x, size, "MEAN", "AVERAGE_POOL_2D")


def adaptive_max_pool(net: Net, x: Handle, size: Sequence[int]) -> tuple[Handle]:
    return (_adaptive(net, x, size, "REDUCE_MAX", "MAX_POOL_2D"),)


def _adaptive(net: Net, x: Handle, size: Sequence[int], whole: str, parts: str) -> Handle:
    height, width = pair(size)
    if len(x.order) != 4 or x.shape[2] % height or x.shape[3] % width:
        raise unsupported(
            net.node,
            f"adaptive pooling from {x.shape[2:]} to {(height, width)}",
            "the input sizes must be multiples of the output sizes: change the size of the example",
        )
    if (height, width) != (1, 1):
        return pool(parts, net, x, (x.shape[2] // height, x.shape[3] // width))
    image = net.permute(x, NHWC)
    shape = (image.shape[0], 1, 1, image.shape[3])
    out = net.add(whole, [image, net.integers(1, 2)], shape, "ReducerOptions", keepDims=True)
    out.not_negative = image.not_negative
    return Handle(out, NHWC)


RULES: dict[str, Callable[..., Any]] = {
    "conv1d": convolution,
    "conv2d": convolution,
    "conv2d.padding": convolution,
    "conv1d.padding": convolution,
    "conv_transpose2d.input": transposed_convolution,
    "linear": linear,
    "addmm": addmm,
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "_native_batch_norm_legit_no_training": normalization,
    "batch_norm": normalization_in_eval,
    "max_pool2d": max_pool,
    "max_pool2d_with_indices": max_pool_with_places,
    "avg_pool2d": average_pool,
    "adaptive_avg_pool2d": adaptive_average_pool,
    "_adaptive_avg_pool2d": adaptive_average_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
}
