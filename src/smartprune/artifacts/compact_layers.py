"""What the layers of a graph do with channels: products with weights, normalization, pooling and attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ..core.kinds import is_convolution
from .compact_attention import attention, contract
from .compact_graph import Graph, Known, Reader, known, reduce_axes, shrink, where_of
from .compact_labels import STAYS
from .compact_rules import (
    ELEMENTWISE,
    MOVES,
    NO_VALUE,
    NORMS,
    Rule,
    add_live,
    arguments,
    elementwise,
    fixed,
    move,
    name_of,
    names,
    norm,
    read,
    unknown,
)

POOLS = {  # name of a pooling or resizing operation -> number of its spatial axes
    f"{kind}{n}d": n
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool", "_adaptive_avg_pool")
    for n in (1, 2, 3)
}
POOLS |= {f"max_pool{n}d_with_indices": n for n in (2, 3)}
POOLS |= {"upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "upsample_linear1d": 1}
POOLS |= {"upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3}
POOLS |= {f"_upsample_nearest_exact{n}d": n for n in (1, 2, 3)}
REDUCTIONS = names("mean sum amax amin var std logsumexp prod var_mean std_mean linalg_vector_norm")


def convolution(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    transposed = name_of(node).startswith("conv_transpose")
    x, rank = read(graph, args["input"]), args["weight"].meta["val"].dim()
    padding = args["padding"]
    if isinstance(padding, str):
        padded = padding != "valid" and any(size > 1 for size in args["weight"].meta["val"].shape[2:])
    else:
        padded = any(size > 0 for size in padding)
    axes = (1, 0) if transposed else (0, 1)
    return product(
        graph, node, x, (args["weight"], args["bias"]), axes, len(x.shape) - rank + 1, args["groups"], transposed or padded
    )


def linear(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x = read(graph, args["input"])
    return product(graph, node, x, (args["weight"], args["bias"]), (0, 1), len(x.shape) - 1, 1, False)


def matrix(graph: Graph, node: fx.Node) -> Any:
    """A matrix product, of a weight or of two activations."""
    args = list(node.args)
    bias = args.pop(0) if name_of(node) == "addmm" else None
    x, weight = args[:2]
    plain = not node.kwargs  # no factors of addmm
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    if graph.parameter(weight) is not None and weight.meta["val"].dim() == 2 and graph.parameter(x) is None and plain:
        value = read(graph, x)
        return product(graph, node, value, (weight, bias), (1, 0), len(value.shape) - 1, 1, False)
    if name_of(node) == "addmm":
        return unknown(graph, node)
    a, b = read(graph, x), read(graph, weight)
    return contract(graph, node, a, b, _is_softmax(x)) if min(len(a.shape), len(b.shape)) > 1 else unknown(graph, node)


def _is_softmax(node: fx.Node) -> bool:
    """Whether the last axis of a result sums to one."""
    while name_of(node) in ("dropout", "clone", "contiguous", "to", "_to_copy", "expand") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return name_of(node) in ("softmax", "_softmax") and node.args[1] in (-1, len(node.meta["val"].shape) - 1)


def product(
    graph: Graph,
    node: fx.Node,
    x: Known,
    parameters: tuple[Any, Any],
    axes: tuple[int, int],
    axis: int,
    groups: int,
    border: bool,
) -> Any:
    """A product with a weight over one axis of ``x``. ``axes`` are those of outputs and inputs in the weight."""
    weight, bias = graph.parameter(parameters[0]), graph.parameter(parameters[1])
    where = where_of(node)
    if weight is None or (parameters[1] is not None and bias is None):
        return fixed(graph, node, f"{where or 'the model'} computes its weight")
    if weight in graph.forms:
        graph.fix(graph.forms[weight], f"{weight} is also read as a tensor")
    if groups > 1 and not _states_groups(graph, weight):
        return fixed(graph, node, f"{where or 'the model'} states the number of groups in its code")
    same = x.label.shape[axis] == 1 or axis in reduce_axes(x.label)
    if same and x.axes() and bool((x.label != STAYS).any()):
        return _over_positions(graph, node, x, axis, weight, bias)
    label, constant, value = _per_channel(graph, x, axis)
    tensor = graph.tensors[weight]
    depthwise = groups > 1 and tensor.shape[1] == 1 and (tensor.shape[0] == groups or axes == (0, 1))
    if groups > 1 and axes == (1, 0) and not depthwise:
        return fixed(graph, node, f"{where} is a transposed convolution with groups")
    out_label = graph.axis_labels(weight, 0 if groups > 1 else axes[0])
    _tie_inputs(graph, weight, label, out_label, axes[1], groups, where)
    if bias is not None:
        graph.labels.unite(graph.axis_labels(bias, 0), out_label, f"{bias} is shared")
    reads = _reads(tensor, axes, groups)
    outputs = reads.shape[0]
    exact = constant & ((value == 0) | (not border))
    meta = node.meta["val"]
    shape = [1] * meta.dim()
    shape[axis] = outputs
    out_constant = ~(reads & ~exact).any(1)
    out = known(meta.shape, out_label.expand(outputs).view(shape), out_constant.view(shape), torch.zeros(shape, dtype=meta.dtype))
    reader = Reader(node, weight, bias, x, out, label, constant, value, reads, axes, groups, border)
    added = reader.response(tensor, torch.where(exact, value, torch.zeros_like(value)))
    if bias is not None:
        added = added + graph.tensors[bias].double()
    out.value = torch.where(out_constant, added, torch.zeros_like(added)).to(meta.dtype).view(shape)
    graph.readers.append(reader)

    def back() -> None:
        used = (reads & out.live.reshape(-1)[:, None]).any(0)
        shape = [1] * len(x.shape)
        shape[axis] = len(used)
        add_live(x, used.view(shape))

    graph.backward.append(back)
    return out


def _states_groups(graph: Graph, weight: str) -> bool:
    """Whether the number of groups is that of a module, which can change with its weight."""
    owner, _, attribute = weight.rpartition(".")
    return attribute == "weight" and is_convolution(graph.model.get_submodule(owner))


def _per_channel(graph: Graph, x: Known, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Label, constant and value of every channel of an axis, which are the same at all positions."""
    others = [i for i in range(len(x.shape)) if i != axis and x.label.shape[i] > 1]
    label, value = shrink(x.label, others), shrink(x.value, others)
    graph.labels.unite(x.label, label, f"{x.where} gives them other channels at other positions")
    constant = x.constant & (x.value == value)
    for i in others:
        constant = constant.all(i, keepdim=True)
    return x.vector(label, axis), x.vector(constant, axis), x.vector(value, axis)


def _over_positions(graph: Graph, node: fx.Node, x: Known, axis: int, weight: str, bias: str | None) -> Any:
    """A product over an axis that holds no channels, such as a layer that mixes positions."""
    where = where_of(node)
    for parameter in (weight, bias):
        if parameter is not None:
            graph.fix_parameter(parameter, f"{where} mixes positions, not channels")
    label = shrink(x.label, [axis])
    meta = node.meta["val"]
    out = known(meta.shape, label, torch.zeros_like(label, dtype=torch.bool), torch.zeros(label.shape, dtype=meta.dtype))
    graph.backward.append(lambda: add_live(x, out.live))
    return out


def _tie_inputs(graph: Graph, weight: str, label: Tensor, out_label: Tensor, axis: int, groups: int, where: str) -> None:
    if groups == 1:
        graph.labels.unite(graph.axis_labels(weight, axis), label, f"{where} has one weight for several inputs")
    elif len(label) == groups:  # depthwise: a channel and all that is computed from it
        graph.labels.unite(label.repeat_interleave(len(out_label) // groups), out_label, f"{where} is depthwise")
        graph.groups.setdefault(weight, (groups, label))
    elif weight in graph.groups:
        graph.labels.unite(graph.groups[weight][1], label, f"{where} has one weight for several inputs")
    else:
        graph.groups[weight] = (groups, label)


def _reads(weight: Tensor, axes: tuple[int, int], groups: int) -> Tensor:
    """Whether an output reads an input, bool [outputs, inputs]."""
    kernels = (weight != 0).movedim(axes, (0, 1)) if groups == 1 else weight != 0
    used = kernels.flatten(2).any(2) if weight.dim() > 2 else kernels
    if groups == 1:
        return used
    if axes == (1, 0):  # transposed: the inputs first
        used = torch.cat([part.t() for part in used.chunk(groups)])
    out = torch.zeros(used.shape[0], groups * used.shape[1], dtype=torch.bool)
    for group, rows in enumerate(torch.arange(used.shape[0]).chunk(groups)):
        out[rows, group * used.shape[1] : (group + 1) * used.shape[1]] = used[rows]
    return out


def batch_norm(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x = read(graph, args["input"])
    per_sample = bool(args.get("use_input_stats"))  # an instance normalization
    statistics = [args.get(name) for name in ("weight", "bias", *(() if per_sample else ("running_mean", "running_var")))]
    parameters = [read(graph, arg) if isinstance(arg, fx.Node) else None for arg in statistics]
    rank = len(x.shape)
    shape = [1, -1] + [1] * (rank - 2)
    given = [replace_shape(p, shape) for p in parameters if p is not None]
    label = x.label
    for parameter in given:
        graph.labels.unite(label, parameter.label, f"{where_of(node)} is shared")
        label = torch.where(label == STAYS, parameter.label, label)
    constant = torch.broadcast_to(x.constant, label.shape) if rank > 1 else x.constant
    if not given and label.shape[1] == x.shape[1]:
        graph.widths[where_of(node)] = shrink(label, [i for i in range(rank) if i != 1]).reshape(-1)
    weight, bias, mean, var = (None if p is None else p.value.view(shape) for p in (*parameters, None, None)[:4])
    value = x.value
    if per_sample:  # a constant minus itself
        value = torch.zeros_like(value) if bias is None else bias + torch.zeros_like(value)
    elif mean is None or var is None or args.get("training"):
        constant = torch.zeros_like(constant)
    else:
        scale = torch.rsqrt(var.double() + args["eps"]) * (1 if weight is None else weight.double())
        value = ((x.value.double() - mean.double()) * scale + (0 if bias is None else bias.double())).to(x.value.dtype)
        value, constant, scale = torch.broadcast_tensors(value, constant, scale)
        flat = scale == 0
        offset = torch.zeros_like(value) if bias is None else bias.to(value.dtype).expand_as(value)
        value, constant = torch.where(flat, offset, value), constant | flat
    out = known(x.shape, label, constant, value)

    def back() -> None:
        used = out.live & ~out.constant
        for operand in (x, *given):
            add_live(operand, used)

    graph.backward.append(back)
    return [out, *(None for _ in node.meta["val"][1:])] if isinstance(node.meta["val"], (tuple, list)) else out


def replace_shape(value: Known, shape: list[int]) -> Known:
    """A vector of parameters in the rank of the channels that it belongs to."""
    parts = {part: getattr(value, part).view(shape) for part in ("label", "constant", "value", "live")}
    return replace(value, shape=tuple(parts["label"].shape), **parts)


def pool(graph: Graph, node: fx.Node) -> Any:
    """Positions are combined, channel by channel. A constant channel stays constant unless zeros are added at the border."""
    args = arguments(node)
    x = read(graph, args["input"] if "input" in args else args["self"])
    spatial = POOLS[name_of(node)]
    several = isinstance(node.meta["val"], (tuple, list))
    indices = several and any(user.args[1:2] == (1,) and user.users for user in node.users)
    if indices or any(size > 1 for size in x.label.shape[len(x.shape) - spatial :]):
        return unknown(graph, node)
    constant, kind = x.constant, name_of(node)
    padding = args.get("padding") or 0
    padded = any(size > 0 for size in padding) if isinstance(padding, (list, tuple)) else padding > 0
    if kind.startswith("lp") or (kind.startswith("avg") and (padded or args.get("ceil_mode") or args.get("divisor_override"))):
        constant = constant & (x.value == 0)
    meta = node.meta["val"][0] if several else node.meta["val"]
    out = known(meta.shape, x.label, constant, x.value)
    graph.backward.append(lambda: add_live(x, out.live & ~out.constant))
    return [out, None] if several else out


def pad(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x, widths = read(graph, args["self"]), args["pad"]
    axes = [len(x.shape) - 1 - i for i in range(len(widths) // 2) if widths[2 * i] or widths[2 * i + 1]]
    if any(x.label.shape[axis] > 1 for axis in axes):
        return _more_channels(graph, node, x)
    constant = x.constant
    if args.get("mode", "constant") == "constant":
        constant = constant & (x.value == (args.get("value") or 0))
    out = known(node.meta["val"].shape, x.label, constant, x.value)
    graph.backward.append(lambda: add_live(x, out.live & ~out.constant))
    return out


def _more_channels(graph: Graph, node: fx.Node, x: Known) -> Any:
    """Constant channels are added before and after those of the input. The code states how many, so they stay."""
    args = arguments(node)
    widths, fill = list(args["pad"]), float(args.get("value") or 0)
    places = [len(x.shape) - 1 - i for i in range(len(widths) // 2) for _ in range(2)]
    if args.get("mode", "constant") != "constant" or min(widths) < 0:
        return fixed(graph, node, f"{where_of(node) or 'the model'} pads the axis of channels")
    varied = [width if x.label.shape[axis] > 1 else 0 for width, axis in zip(widths, places, strict=True)]
    constant, value = x.constant, x.value
    if any(width and not extra for width, extra in zip(widths, varied, strict=True)):
        constant = constant & (value == fill)
    label = torch.nn.functional.pad(x.label, varied, value=STAYS)
    constant = torch.nn.functional.pad(constant, varied, value=True)
    out = known(node.meta["val"].shape, label, constant, torch.nn.functional.pad(value, varied, value=fill))
    inside = [-width for width in varied]
    graph.backward.append(lambda: add_live(x, torch.nn.functional.pad(out.live & ~out.constant, inside)))
    return out


def _alike_along(graph: Graph, x: Known, axes: list[int], where: str) -> bool:
    """Whether the labels of a tensor differ along another axis than these, along which positions are then tied."""
    others = [axis for axis, size in enumerate(x.label.shape) if size > 1 and axis not in axes]
    if all(axis in reduce_axes(x.label) for axis in others):
        return False
    graph.labels.unite(x.label, shrink(x.label, axes), f"{where} combines them with values that are not removed")
    for axis in axes:
        x.keep_positions(axis, torch.ones(x.shape[axis], dtype=torch.bool))
    return True


def reduction(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x, meta = read(graph, args["self"]), node.meta["val"]
    dims = args.get("dim")
    dims = list(range(len(x.shape))) if dims in (None, []) else [dims] if isinstance(dims, int) else list(dims)
    dims = [axis % len(x.shape) for axis in dims]
    uniform, where = reduce_axes(x.label), where_of(node) or "the model"
    varied = [axis for axis in dims if x.label.shape[axis] > 1 and axis not in uniform]
    if not isinstance(meta, Tensor) or (varied and not _alike_along(graph, x, varied, where)):
        kind = {"linalg_vector_norm": "norm"}.get(name_of(node), name_of(node))
        return fixed(graph, node, f"{where} computes the {kind} over all of them")
    first = shrink(x.value, dims)
    constant = x.constant & (x.value == first)
    for axis in dims:
        constant = constant.all(axis, keepdim=True)
    if name_of(node) not in ("mean", "amax", "amin"):
        zero_stays = name_of(node) in ("sum", "linalg_vector_norm")
        constant = constant & (first == 0 if zero_stays else torch.zeros_like(constant))
    if varied == dims and name_of(node) == "sum":  # such as branches that are stacked and added
        constant, first = x.constant, x.value
        for axis in dims:
            constant, first = constant.all(axis, keepdim=True), first.sum(axis, keepdim=True)
    shape = [size for axis, size in enumerate(first.shape) if axis not in dims or meta.dim() == len(x.shape)]
    out = known(meta.shape, shrink(x.label, dims).reshape(shape), constant.reshape(shape), first.reshape(shape).to(meta.dtype))
    graph.backward.append(lambda: add_live(x, (out.live & ~out.constant).reshape(first.shape)))
    return out


def softmax(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x = read(graph, args["self"])
    axis = args["dim"] % len(x.shape)
    if x.label.shape[axis] > 1 and not _alike_along(graph, x, [axis], where_of(node) or "the model"):
        return norm(graph, node)
    out = known(x.shape, x.label, torch.zeros_like(x.constant), x.value)
    graph.backward.append(lambda: add_live(x, out.live.any(axis, keepdim=True)))
    return out


def prelu(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    x, weight = read(graph, args["self"]), read(graph, args["weight"])
    slope = replace_shape(weight, [1, -1] + [1] * (len(x.shape) - 2))
    label = x.label
    if weight.shape[0] > 1:
        graph.labels.unite(label, slope.label, f"{where_of(node)} is shared")
        label = torch.where(label == STAYS, slope.label, label)
    out = known(x.shape, label, x.constant, torch.where(x.value >= 0, x.value, x.value * slope.value))
    graph.backward.append(lambda: add_live(x, out.live & ~out.constant))
    return out


def embedding(graph: Graph, node: fx.Node) -> Any:
    args = arguments(node)
    weight = graph.parameter(args["weight"])
    if weight is None:
        return unknown(graph, node)
    tensor, meta = graph.tensors[weight], node.meta["val"]
    graph.labels.fix(graph.axis_labels(weight, 0), f"{where_of(node)} is an embedding")
    shape = [1] * (meta.dim() - 1) + [tensor.shape[1]]
    label = graph.axis_labels(weight, 1)
    return known(meta.shape, label.view(shape), (tensor == tensor[:1]).all(0).view(shape), tensor[0].view(shape))


RULES: dict[str, Rule] = {
    **dict.fromkeys(sorted(ELEMENTWISE), elementwise),
    **dict.fromkeys(sorted(MOVES), move),
    **dict.fromkeys(sorted(NORMS), norm),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys(sorted(REDUCTIONS), reduction),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), convolution),
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm"), matrix),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(sorted(NO_VALUE), lambda graph, node: None),
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "embedding": embedding,
    "linear": linear,
    "prelu": prelu,
    "_prelu_kernel": unknown,
    "scaled_dot_product_attention": attention,
}
