"""What each operation of a graph does with channels: which entries belong together, which are constant, and which are used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..core.kinds import is_layer
from ..errors import SmartpruneError
from .compact_graph import Graph, Known, by_position, classes_of, known, line_of, opaque, reduce_axes, shrink, where_of
from .compact_labels import STAYS

Rule = Callable[[Graph, fx.Node], Any]
MAX_ENTRIES = 1 << 18  # of parameters that are followed entry by entry; larger ones stay as they are
FIXED_WIDTH = "torch.nn.modules.activation.MultiheadAttention"  # it checks its widths


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = names(
    "add sub rsub mul div true_divide relu relu6 silu gelu sigmoid tanh hardtanh hardswish hardsigmoid leaky_relu elu celu selu "
    "softplus mish exp exp2 expm1 log log2 log10 log1p sqrt rsqrt pow abs neg clamp clamp_min clamp_max maximum minimum where "
    "masked_fill eq ne lt le gt ge square erf erfc sin cos tan asin acos atan sinh cosh atan2 to _to_copy clone contiguous "
    "dropout alpha_dropout feature_dropout threshold sign floor ceil round trunc frac addcmul addcdiv lerp "
    "reciprocal logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not hardshrink softshrink softsign logsigmoid "
    "log_sigmoid nan_to_num detach alias lift_fresh_copy type_as zeros_like ones_like full_like fill positive"
)
MOVES = names(
    "view reshape _unsafe_view flatten unflatten permute transpose t squeeze unsqueeze expand expand_as slice select cat "
    "concat stack chunk split split_with_sizes tensor_split unbind narrow movedim swapaxes pixel_shuffle pixel_unshuffle "
    "channel_shuffle native_channel_shuffle repeat tile roll flip repeat_interleave slice_scatter select_scatter"
)
RESIZES = names("view reshape _unsafe_view unflatten expand repeat tile split_with_sizes slice_scatter select_scatter")
NORMS = names("layer_norm native_layer_norm group_norm native_group_norm rms_norm _fused_rms_norm local_response_norm")
NO_VALUE = names("_assert_tensor_metadata _assert_async sym_constrain_range_for_size sym_constrain_range")


def name_of(node: fx.Node) -> str:
    """The name of an operation without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).rpartition("::")[2].removesuffix("_")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operation by name, with defaults."""
    out = {}
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        out[argument.name] = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
    return out


def read(graph: Graph, node: fx.Node) -> Known:
    """What is known about an argument. A parameter becomes a tensor of the graph when it is read."""
    name = graph.parameter(node)
    if name is None:
        value = graph.values[node.name]
        if not isinstance(value, Known):
            raise SmartpruneError(f"compact: {node.name} is not a tensor")
        return value
    if name not in graph.forms:
        tensor = graph.tensors[name]
        owner, _, attribute = name.rpartition(".")
        of_layer = attribute == "weight" and is_layer(graph.model.get_submodule(owner))
        if tensor.dim() > 1 and (of_layer or tensor.numel() > MAX_ENTRIES):
            graph.forms[name] = opaque(tensor)
            return graph.forms[name]
        label = graph.axis_labels(name, 0) if tensor.dim() == 1 else graph.labels.fresh(tensor.numel()).view(tensor.shape)
        graph.forms[name] = known(tensor.shape, label, torch.ones(tensor.shape, dtype=torch.bool), tensor)
        graph.forms[name].where = name.rpartition(".")[0]
    return graph.forms[name]


def operands(node: fx.Node) -> list[fx.Node]:
    """The arguments that are tensors, in order."""
    return [arg for arg in torch.utils._pytree.arg_tree_leaves(*node.args, **node.kwargs) if isinstance(arg, fx.Node)]


def run(node: fx.Node, replace: Callable[[fx.Node], Any]) -> Any:
    """The result of the operation on other arguments."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), replace)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def add_live(value: Known, live: Tensor) -> None:
    """Marks entries as used. The mask broadcasts with the tensor, and may have more axes."""
    while live.dim() > value.live.dim():
        live = live.any(0)
    lead = value.live.dim() - live.dim()
    live = live.reshape((1,) * lead + live.shape)
    for axis, size in enumerate(value.live.shape):
        if size == 1 and live.shape[axis] > 1:
            live = live.any(axis, keepdim=True)
    value.live |= live


def aligned(tensor: Tensor, rank: int) -> Tensor:
    return tensor.reshape((1,) * (rank - tensor.dim()) + tensor.shape)


def elementwise(graph: Graph, node: fx.Node) -> Known:
    """Every entry of the result is computed from the entries at the same position."""
    out = node.meta["val"]
    rank = out.dim()
    values = [read(graph, x) for x in operands(node)]
    by_node = dict(zip(operands(node), values, strict=True))
    label = tie(graph, values, rank, where_of(node) or name_of(node))
    constant = torch.ones((1,) * rank, dtype=torch.bool)
    for value in values:
        constant = constant & aligned(value.constant, rank)
    result = run(node, lambda x: by_node[x].value)
    result = result[0] if isinstance(result, (tuple, list)) else result
    result = aligned(result, rank)
    if name_of(node) in ("zeros_like", "ones_like", "full_like"):
        constant = torch.ones_like(constant)
    if name_of(node) == "mul" and len(values) == 2:
        a, b = (aligned(v.constant & (v.value == 0), rank) for v in values)
        constant, result = constant | a | b, result.masked_fill(a | b, 0)
    value = known(out.shape, label, constant, result)

    def back() -> None:
        for operand in values:
            add_live(operand, value.live & ~value.constant)

    graph.backward.append(back)
    return value


def tie(graph: Graph, values: Sequence[Known], rank: int, where: str) -> Tensor:
    """The labels of a result whose entries are computed from the entries at the same position."""
    labels = [aligned(value.label, rank) for value in values]
    axes = {axis for label in labels for axis in range(rank) if label.shape[axis] > 1}
    tied = torch.full((1,) * rank, STAYS)
    pairs = sorted(zip(values, labels, strict=True), key=lambda pair: bool((pair[1] == STAYS).all()))  # those that stay come last
    for value, label in pairs:
        shape = (1,) * (rank - len(value.shape)) + value.shape
        if axes and all(shape[axis] == 1 for axis in axes):  # such as a factor per pixel
            graph.labels.fix(label, "a single channel")
            continue
        if len(value.shape) == 0:
            continue
        if bool((tied != STAYS).any()):
            graph.labels.unite(tied, label, f"{where} combines them with values that are not removed")
        tied = torch.where(tied == STAYS, label, tied)
    return graph.labels.same(tied)


def move(graph: Graph, node: fx.Node) -> Any:
    """The result has the entries of its arguments at other positions."""
    values = {x: read(graph, x) for x in operands(node)}
    starts, stores, end = {}, list(values.values()), 0
    for x, value in values.items():
        starts[x] = end
        end += value.label.numel()
    along = arguments(node).get("dim", 0) if name_of(node) in ("cat", "split", "split_with_sizes", "chunk") else None

    def positions(x: fx.Node) -> Tensor:
        value = values[x]
        index = torch.arange(value.label.numel(), dtype=torch.double).view(value.label.shape) + starts[x]
        shape = value.shape if along is None else thin(value, along)
        return index.expand(shape).contiguous()

    def thin(value: Known, axis: int) -> list[int]:
        widths = [max(v.label.shape[i] for v in stores) for i in range(len(value.shape))]
        axis %= len(value.shape)
        return [value.shape[i] if i == axis or width > 1 else 1 for i, width in enumerate(widths)]

    results = run(node, positions)
    several = isinstance(results, (tuple, list))
    metas = node.meta["val"] if several else [node.meta["val"]]
    label, constant, live = (torch.cat([getattr(v, part).reshape(-1) for v in stores]) for part in ("label", "constant", "live"))
    content = torch.cat([v.value.reshape(-1).to(metas[0].dtype) for v in stores])
    outs, indices = [], []
    for result, meta in zip(results if several else [results], metas, strict=True):
        index = shrink(result, reduce_axes(result)).long()
        outs.append(known(meta.shape, label[index], constant[index], content[index]))
        indices.append(index)

    def back() -> None:
        live.zero_()
        for out, index in zip(outs, indices, strict=True):
            live[index[out.live]] = True
        for part, value in zip(live.split([v.live.numel() for v in stores]), stores, strict=True):
            value.live |= part.view(value.live.shape)

    graph.backward.append(back)
    keep_sizes(graph, node, stores, outs)
    return outs if several else outs[0]


def keep_sizes(graph: Graph, node: fx.Node, values: list[Known], outs: list[Known]) -> None:
    """What the code of the model expects of the sizes of the arguments or results of a move."""
    name, args = name_of(node), arguments(node)
    if name in RESIZES:
        graph.reshapes.setdefault(line_of(node), []).extend(out for out in outs if out.axes())
    if name in ("slice", "select", "unbind", "narrow", "split", "chunk", "tensor_split", "stack"):
        value = outs[0] if name == "stack" else values[0]
        axis = args["dim"] % len(value.shape)
        size = value.shape[axis]
        if value.label.shape[axis] == 1:
            return
        keep = torch.ones(size, dtype=torch.bool)
        if name == "split" and len({out.shape[axis] for out in outs}) == 1:
            graph.balanced.append([by_position(out.label, axis) for out in outs])
            graph.reshapes.setdefault(line_of(node), []).append(value)
            return
        if name == "slice" and args["step"] == 1:
            start, end = args["start"] or 0, size if args["end"] is None else min(args["end"], size)
            if start >= 0 and end >= 0:
                keep = torch.arange(size) < (end if end < size else start)
        if name == "select" and args["index"] >= 0:
            keep = torch.arange(size) <= args["index"]
        value.keep_positions(axis, keep)


def unknown(graph: Graph, node: fx.Node) -> Any:
    """An operation that is not in the table: nothing that it reads may change."""
    where = where_of(node)
    reason = f"{where + ' runs ' if where else ''}{name_of(node) or node.name}, which needs all of them"
    return fixed(graph, node, reason)


def fixed(graph: Graph, node: fx.Node, reason: str) -> Any:
    """The result of an operation that reads all entries of its arguments, and none of them may be removed."""
    read_values = []
    for x in operands(node):
        name = graph.parameter(x)
        if name is not None and (graph.tensors[name].dim() != 1):
            graph.fix_parameter(name, reason)
            continue
        for value in flat(graph.values[x.name] if name is None else read(graph, x)):
            graph.fix(value, reason)
            read_values.append(value)

    def back() -> None:
        for value in read_values:
            value.live.fill_(True)

    graph.backward.append(back)
    return torch.utils._pytree.tree_map(lambda x: opaque(x) if isinstance(x, Tensor) else x, node.meta.get("val"))


def flat(value: Any) -> list[Known]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Known)]


def norm(graph: Graph, node: fx.Node) -> Any:
    where = where_of(node) or name_of(node)
    return fixed(graph, node, f"{where} normalizes over all of them")


def get_item(graph: Graph, node: fx.Node) -> Any:
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    return graph.values[source.name][index]


def record(graph: Graph, rules: dict[str, Rule]) -> None:
    """Goes through the graph, and then back from the outputs of the model to what they depend on."""
    for node in graph.nodes:
        if node.op == "placeholder":
            if graph.parameter(node) is None:
                content = graph.constants.get(node.name)
                value = opaque(node.meta["val"]) if isinstance(node.meta.get("val"), Tensor) else None
                if value is not None and isinstance(content, Tensor):
                    value = known(content.shape, value.label, torch.ones_like(content, dtype=torch.bool), content.detach())
                graph.values[node.name] = value
        elif node.op == "call_function":
            rule = rules.get(name_of(node), unknown)
            if any(cls.startswith(FIXED_WIDTH) for cls in classes_of(node)):
                rule = attention_of_torch
            value = get_item(graph, node) if getattr(node.target, "__name__", "") == "getitem" else follow(graph, node, rule)
            for part in flat(value):
                part.where = part.where or where_of(node)
            graph.values[node.name] = value
        elif node.op == "output":
            outputs = [v for x in operands(node) for v in flat(read(graph, x) if graph.parameter(x) else graph.values[x.name])]
            for value in outputs:
                graph.fix(value, "an output of the model")
                value.live.fill_(True)
    for name in graph.forms:
        if name in graph.weights and graph.tensors[name].dim() > 1:
            graph.fix(graph.forms[name], f"{name} is a weight and is also read as a tensor")
            graph.fix_parameter(name, f"{name} is a weight and is also read as a tensor")
    for back in reversed(graph.backward):
        back()


def follow(graph: Graph, node: fx.Node, rule: Rule) -> Any:
    """What a rule says about an operation. Where a rule fails, nothing that the operation reads may change."""
    lists: tuple[list[Any], ...] = (graph.backward, graph.readers, graph.products, graph.alike, graph.balanced)
    lengths = [len(entries) for entries in lists]
    try:
        return rule(graph, node)
    except Exception:  # an operation of torch may refuse the tensors that stand for positions and constants
        for entries, length in zip(lists, lengths, strict=True):
            del entries[length:]
        return unknown(graph, node)


def attention_of_torch(graph: Graph, node: fx.Node) -> Any:
    return fixed(graph, node, f"{where_of(node)} is an attention of torch, whose widths are fixed")
