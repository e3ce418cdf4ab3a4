"""From a traced network to steps that the native program can run; what has no step stays with torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

INFINITE = (-math.inf, math.inf)
Shape = tuple[int, ...]
Array = Any  # numpy arrays of float32


@dataclass(frozen=True)
class Activation:
    """What follows a sum: ``clamp`` between two bounds (ReLU, ReLU6), or a function by name."""

    name: str = "clamp"
    low: float = -math.inf
    high: float = math.inf
    slope: float = 0.0

    @property
    def nothing(self) -> bool:
        return self == NOTHING


NOTHING = Activation()


@dataclass(eq=False)
class Step:
    """One operation on whole tensors, in the order (images, channels, rows, columns)."""

    kind: str
    node: fx.Node
    inputs: list[fx.Node]
    rows: bool = False  # the tensor's last axis holds the channels, all others are rows: a linear layer on more than two axes
    weight: Array | None = None  # convolution: [out, in, kh, kw]; depthwise: [channels, kh, kw]
    bias: Array | None = None  # also of an affine step
    scale: Array | None = None  # of an affine step
    activation: Activation = NOTHING
    addition: str = "none"  # the last input is added "before" or "after" the activation
    spread: bool = False  # the second of two inputs has one value per channel
    window: dict[str, int] = field(default_factory=dict)

    @property
    def linear(self) -> bool:
        """Whether a scale per output channel can be folded into it."""
        return self.kind in ("conv", "depthwise", "affine") and self.activation.nothing and self.addition == "none"


@dataclass
class Context:
    """What a handler may look at: the traced modules and the tensor shapes of this run."""

    modules: Mapping[str, nn.Module]
    shapes: Mapping[fx.Node, Shape]
    rows: set[fx.Node]  # nodes whose value is stored as rows

    def shape(self, node: object) -> Shape | None:
        return self.shapes.get(node) if isinstance(node, fx.Node) else None


Handler = Callable[[Context, fx.Node, Sequence[Any], Mapping[str, Any]], Step | None]


def lower(traced: fx.GraphModule, shapes: Mapping[fx.Node, Shape]) -> dict[fx.Node, Step]:
    """A step for every node that has one."""
    context = Context(dict(traced.named_modules()), shapes, set())
    out: dict[fx.Node, Step] = {}
    for node in traced.graph.nodes:
        if node not in shapes:
            continue
        step = _step(context, node)
        if step is None or any(source not in shapes for source in step.inputs):
            continue
        if step.rows:
            context.rows.add(node)
        out[node] = step
    maps = {source for step in out.values() if not step.rows for source in step.inputs}
    maps |= {node for node, step in out.items() if not step.rows}
    # a value has one layout: what others read or make as a map is not read as rows
    return {node: step for node, step in out.items() if not (step.rows and maps.intersection(step.inputs))}


def _step(context: Context, node: fx.Node) -> Step | None:
    if node.op == "call_module":
        module = context.modules[str(node.target)]
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        found = MODULES.get(type(module))
        args, kwargs = (module, *node.args), node.kwargs
        if set(kwargs) == {"input"} and not node.args:
            args, kwargs = (module, kwargs["input"]), {}
        if kwargs:
            return None
    elif node.op in ("call_function", "call_method"):
        found = FUNCTIONS.get(node.target) if node.op == "call_function" else METHODS.get(str(node.target))
        args, kwargs = node.args, node.kwargs
    else:
        return None
    if found is None:
        return None
    try:
        return found(context, node, args, kwargs)
    except (TypeError, ValueError, KeyError, IndexError):  # arguments of a form that is not known here
        return None


def numpy(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def pair(value: Any) -> tuple[int, int]:
    a, b = value if isinstance(value, (tuple, list)) else (value, value)
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError(value)
    return a, b


def is_map(shape: Shape | None) -> bool:
    return shape is not None and len(shape) in (2, 4) and all(shape)


# ---- layers with weights


def convolution(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    module, x = args
    shape = context.shape(x)
    if shape is None or len(shape) != 4 or not all(shape) or x in context.rows or module.padding_mode != "zeros":
        return None
    (kh, kw), (sh, sw), (dh, dw) = pair(module.kernel_size), pair(module.stride), pair(module.dilation)
    if module.padding == "same":  # torch puts the odd one at the end
        ph, pw = dh * (kh - 1) // 2, dw * (kw - 1) // 2
    elif module.padding == "valid":
        ph = pw = 0
    else:
        ph, pw = pair(module.padding)
    window = {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "dh": dh, "dw": dw, "ph": ph, "pw": pw}
    weight = numpy(module.weight)
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_channels, np.float32)
    if module.groups == module.in_channels == module.out_channels and module.groups > 1:
        return Step("depthwise", node, [x], weight=weight[:, 0], bias=bias, window=window)
    if module.groups > 1:  # the zeros between groups are skipped like any others
        per_out, per_in = module.out_channels // module.groups, module.in_channels // module.groups
        full = np.zeros((module.out_channels, module.in_channels, kh, kw), np.float32)
        for g in range(module.groups):
            rows = slice(g * per_out, (g + 1) * per_out)
            full[rows, g * per_in : (g + 1) * per_in] = weight[rows]
        weight = full
    return Step("conv", node, [x], weight=weight, bias=bias, window=window)


POINT = {"kh": 1, "kw": 1, "sh": 1, "sw": 1, "dh": 1, "dw": 1, "ph": 0, "pw": 0}


def linear(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    module, x = args
    shape = context.shape(x)
    if shape is None or len(shape) < 2 or not all(shape):
        return None
    rows = len(shape) > 2
    if not rows and x in context.rows:
        return None
    bias = numpy(module.bias) if module.bias is not None else np.zeros(module.out_features, np.float32)
    return Step("conv", node, [x], rows, weight=numpy(module.weight)[:, :, None, None], bias=bias, window=dict(POINT))


def norm(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    module, x = args
    if not is_map(context.shape(x)) or x in context.rows or module.running_mean is None or module.running_var is None:
        return None
    one = torch.ones(module.num_features, 1, 1, 1, dtype=torch.float64, device="cpu")
    weight = None if module.weight is None else module.weight.double()
    bias = None if module.bias is None else module.bias.double()
    mean, variance = module.running_mean.double(), module.running_var.double()
    scale, shift = fuse_conv_bn_weights(one, None, mean, variance, module.eps, weight, bias)
    return Step("affine", node, [x], scale=numpy(scale).reshape(-1), bias=numpy(shift))


# ---- windows


def max_pool(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return _max_pool(context, node, *args, **kwargs)


def _max_pool(
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
    if return_indices or not _spatial(context, x):
        return None
    (kh, kw), (ph, pw), (dh, dw) = pair(kernel_size), pair(padding), pair(dilation)
    sh, sw = pair(kernel_size if stride is None else stride)
    window = {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": dh, "dw": dw}
    return Step("max_pool", node, [x], window=window)


def max_pool_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    m, x = args
    return _max_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)


def average_pool(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return _average_pool(context, node, *args, **kwargs)


def _average_pool(
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
    if not _spatial(context, x):
        return None
    (kh, kw), (ph, pw) = pair(kernel_size), pair(padding)
    sh, sw = pair(kernel_size if stride is None else stride)
    window = {"kh": kh, "kw": kw, "sh": sh, "sw": sw, "ph": ph, "pw": pw, "dh": 1, "dw": 1}
    return Step("average_pool", node, [x], window=window | {"flag": int(count_include_pad), "argument": divisor_override or 0})


def average_pool_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    m, x = args
    return _average_pool(context, node, x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)


def adaptive(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    x = args[0]
    out, shape = context.shape(node), context.shape(x)
    if not _spatial(context, x) or out is None or shape is None:
        return None
    if out[2:] == (1, 1):
        return Step("mean", node, [x])
    if shape[2] % out[2] or shape[3] % out[3]:  # windows of unequal size
        return None
    sh, sw = shape[2] // out[2], shape[3] // out[3]
    window = {"kh": sh, "kw": sw, "sh": sh, "sw": sw, "ph": 0, "pw": 0, "dh": 1, "dw": 1, "flag": 1, "argument": 0}
    return Step("average_pool", node, [x], window=window)


def adaptive_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return adaptive(context, node, args[1:], kwargs)


def mean(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return _mean(context, node, *args, **kwargs)


def _mean(context: Context, node: fx.Node, x: fx.Node, dim: Any = None, keepdim: bool = False) -> Step | None:
    if not _spatial(context, x) or not isinstance(dim, (tuple, list)) or sorted(d % 4 for d in dim) != [2, 3]:
        return None
    return Step("mean", node, [x])


def _spatial(context: Context, x: object) -> bool:
    shape = context.shape(x)
    return shape is not None and len(shape) == 4 and all(shape) and x not in context.rows


def upsample(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return _upsample(context, node, *args, **kwargs)


def upsample_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    m, x = args
    return _upsample(context, node, x, m.size, m.scale_factor, m.mode, m.align_corners, m.recompute_scale_factor)


def _upsample(
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
    if antialias or mode not in ("nearest", "bilinear") or not _spatial(context, x) or shape is None or out is None:
        return None
    (h, w), (oh, ow) = shape[2:], out[2:]
    pairs: Sequence[float] = (oh / h, ow / w)
    if scale_factor is not None and not recompute_scale_factor:  # 3.2 makes 12 of 4, and still counts in steps of 3.2
        pairs = scale_factor if isinstance(scale_factor, (tuple, list)) else (scale_factor, scale_factor)
    if mode == "nearest":
        whole = (oh, ow) == (h * pairs[0], w * pairs[1]) and oh % h == 0 and ow % w == 0
        return Step("upsample", node, [x], window={"sh": oh // h, "sw": ow // w}) if whole else None
    if align_corners:
        ratio = [(a - 1) / (b - 1) if b > 1 else 0.0 for a, b in ((h, oh), (w, ow))]
    else:
        ratio = [1.0 / float(factor) for factor in pairs]
    return Step("bilinear", node, [x], scale=np.asarray(ratio, np.float32), window={"flag": int(bool(align_corners))})


# ---- one tensor or two, number by number


def unary(activation: Activation) -> Handler:
    def handler(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
        x = args[0]
        if any(key not in ("inplace", "input") for key in kwargs) or len(args) > 2:
            return None
        return _pointwise(context, node, x, activation)

    return handler


def _pointwise(context: Context, node: fx.Node, x: object, activation: Activation) -> Step | None:
    if not isinstance(x, fx.Node) or x not in context.shapes or not (x in context.rows or is_map(context.shape(x))):
        return None
    return Step("unary", node, [x], x in context.rows, activation=activation)


def module_unary(read: Callable[[Any], Activation | None]) -> Handler:
    def handler(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
        activation = read(args[0])
        return None if activation is None else _pointwise(context, node, args[1], activation)

    return handler


def clamp(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    bound = dict(zip(("input", "min", "max"), args, strict=False)) | dict(kwargs)
    low, high = bound.get("min"), bound.get("max")
    if not all(v is None or isinstance(v, (int, float)) for v in (low, high)) or set(bound) - {"input", "min", "max"}:
        return None
    limits = Activation("clamp", -math.inf if low is None else float(low), math.inf if high is None else float(high))
    return _pointwise(context, node, bound["input"], limits)


def hardtanh(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    bound = dict(zip(("input", "min_val", "max_val"), args, strict=False)) | dict(kwargs)
    limits = Activation("clamp", float(bound.get("min_val", -1.0)), float(bound.get("max_val", 1.0)))
    return _pointwise(context, node, bound["input"], limits)


def leaky(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    bound = dict(zip(("input", "negative_slope"), args, strict=False)) | dict(kwargs)
    return _pointwise(context, node, bound["input"], Activation("leaky", slope=float(bound.get("negative_slope", 0.01))))


def gelu(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return _pointwise(context, node, args[0], Activation("gelu")) if kwargs.get("approximate", "none") == "none" else None


def binary(kind: str) -> Handler:
    def handler(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
        if kwargs or len(args) != 2:
            return None
        a, b = args
        if isinstance(a, (int, float)):
            a, b = b, a
        if isinstance(b, (int, float)) and not isinstance(b, bool):
            shape = context.shape(a)
            if shape is None or not is_map(shape) or a in context.rows:
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
        spread = second[0] in (1, first[0]) and second[1] == first[1] and second[2:] in ((1, 1), first[2:])
        return Step(kind, node, [a, b], spread=True) if spread and context.shape(node) == first else None

    return handler


def concatenate(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    bound = dict(zip(("tensors", "dim"), args, strict=False)) | dict(kwargs)
    parts = list(bound["tensors"])
    if (
        not all(is_map(context.shape(p)) and p not in context.rows for p in parts)
        or len({len(context.shapes[p]) for p in parts}) != 1
    ):
        return None
    return Step("cat", node, parts) if bound.get("dim", 0) % len(context.shapes[parts[0]]) == 1 else None


def same(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    """Gives its input: dropout and the like."""
    x = args[0]
    if context.shape(x) is None or context.shape(x) != context.shape(node) or not (x in context.rows or is_map(context.shape(x))):
        return None
    return Step("alias", node, [x], x in context.rows)


def same_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return same(context, node, args[1:], kwargs)


def dropout(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    bound = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    return None if bound.get("training", True) else same(context, node, [bound["input"]], {})


def reshape(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    """Flattening a map of one pixel, or addition such a pixel, moves nothing."""
    x = args[0]
    before, after = context.shape(x), context.shape(node)
    if before is None or after is None or not is_map(before) or not is_map(after) or x in context.rows:
        return None
    wide = [(*shape, 1, 1)[:4] for shape in (before, after)]
    return Step("alias", node, [x]) if wide[0] == wide[1] else None


def reshape_module(context: Context, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step | None:
    return reshape(context, node, args[1:], kwargs)


RELU, RELU6 = Activation("clamp", 0.0), Activation("clamp", 0.0, 6.0)
SILU, SIGMOID = Activation("silu"), Activation("sigmoid")
HARDSWISH, HARDSIGMOID = Activation("hardswish"), Activation("hardsigmoid")

MODULES: dict[type[nn.Module], Handler] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm2d: norm,
    nn.BatchNorm1d: norm,
    nn.MaxPool2d: max_pool_module,
    nn.AvgPool2d: average_pool_module,
    nn.AdaptiveAvgPool2d: adaptive_module,
    nn.Upsample: upsample_module,
    nn.UpsamplingNearest2d: upsample_module,
    nn.ReLU: module_unary(lambda m: RELU),
    nn.ReLU6: module_unary(lambda m: RELU6),
    nn.Hardtanh: module_unary(lambda m: Activation("clamp", float(m.min_val), float(m.max_val))),
    nn.SiLU: module_unary(lambda m: SILU),
    nn.Sigmoid: module_unary(lambda m: SIGMOID),
    nn.Hardswish: module_unary(lambda m: HARDSWISH),
    nn.Hardsigmoid: module_unary(lambda m: HARDSIGMOID),
    nn.LeakyReLU: module_unary(lambda m: Activation("leaky", slope=float(m.negative_slope))),
    nn.GELU: module_unary(lambda m: Activation("gelu") if m.approximate == "none" else None),
    nn.Dropout: same_module,
    nn.Dropout2d: same_module,
    nn.Identity: same_module,
    nn.Flatten: reshape_module,
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
    F.leaky_relu: leaky,
    F.gelu: gelu,
    F.hardtanh: hardtanh,
    torch.clamp: clamp,
    F.dropout: dropout,
    F.max_pool2d: max_pool,
    F.avg_pool2d: average_pool,
    F.adaptive_avg_pool2d: adaptive,
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


def fuse(steps: list[Step], kept: set[fx.Node]) -> list[Step]:
    """Folds batch norms, activations and additions into the convolution that they follow.

    ``steps`` are in order; ``kept`` are nodes whose own value somebody else needs. A step that takes in another one
    gives its value: its ``node`` becomes the other's.
    """
    maker: dict[fx.Node, Step] = {}
    order: dict[fx.Node, int] = {}
    readers: dict[fx.Node, int] = {}
    for step in steps:
        for source in step.inputs:
            readers[source] = readers.get(source, 0) + 1
    alias: dict[fx.Node, fx.Node] = {}
    out: list[Step] = []

    def free(node: fx.Node) -> Step | None:
        """The step that makes a value which nobody else reads."""
        step = maker.get(node)
        return step if step is not None and readers.get(node) == 1 and node not in kept else None

    for number, raw in enumerate(steps):
        step = replace(raw, inputs=[alias.get(source, source) for source in raw.inputs])
        taken: Step | None = None
        if step.kind == "alias":
            source = step.inputs[0]
            if raw.node in kept or source in kept or source not in maker:  # it has a reader outside, under its own name
                pass
            else:
                alias[step.node] = source
                readers[source] = readers[source] - 1 + readers.get(step.node, 0)
                continue
        elif step.kind == "affine" and (before := free(step.inputs[0])) and before.linear and before.kind != "affine":
            assert before.weight is not None and before.bias is not None and step.scale is not None and step.bias is not None  # noqa: PT018
            scale = step.scale.astype(np.float64)
            before.weight = (before.weight * scale.reshape(-1, *[1] * (before.weight.ndim - 1))).astype(np.float32)
            before.bias = (before.bias * scale + step.bias).astype(np.float32)
            taken = before
        elif step.kind == "unary" and (before := free(step.inputs[0])) and before.activation.nothing and before.addition != "after":
            if before.kind in ("conv", "depthwise", "affine", "add", "multiply"):
                before.activation = step.activation
                taken = before
        elif step.kind == "add":
            choices = [(order[s], i) for i, s in enumerate(step.inputs) if s in order]
            for _, i in sorted(choices, reverse=True):
                before, other = free(step.inputs[i]), step.inputs[1 - i]
                if before is None or before.kind != "conv" or before.addition != "none" or other is step.inputs[i]:
                    continue
                if step.spread or order.get(other, -1) > order[step.inputs[i]]:
                    continue
                before.addition = "before" if before.activation.nothing else "after"
                before.inputs = [*before.inputs, other]
                taken = before
                break
        if taken is not None:
            order[step.node] = order[taken.node]
            taken.node = step.node
            maker[step.node] = taken
        else:
            out.append(step)
            order[step.node] = number
            maker[step.node] = step
    return out
