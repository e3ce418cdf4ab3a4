"""Operations without a kernel, written as operations that have one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..cpu.entries import LANES
from ..lower.moves import interleave
from ..lower.steps import Shape


def rewrite(traced: fx.GraphModule, shapes: Mapping[fx.Node, Shape]) -> bool:
    """Replaces nodes of a graph, which then computes the same up to rounding. Returns whether there were any."""
    changed = False
    for node in list(traced.graph.nodes):
        if node not in shapes:
            continue
        with traced.graph.inserting_before(node):
            out = _rewritten(traced, node, shapes[node])
        if out is not None:
            node.replace_all_uses_with(out)
            traced.graph.erase_node(node)
            changed = True
    traced.recompile()
    return changed


def _rewritten(traced: fx.GraphModule, node: fx.Node, shape: Shape) -> fx.Node | None:
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        rewriter = MODULES.get(type(module))
        plain = len(node.args) == 1 and not node.kwargs and not module._forward_hooks and not module._forward_pre_hooks
        return rewriter(traced, node, module, shape) if rewriter is not None and plain else None
    if (
        (node.op, node.target) in SUBTRACTIONS
        and not node.kwargs
        and all(isinstance(x, fx.Node) and x.op != "get_attr" for x in node.args)
    ):
        call = traced.graph.call_function
        return call(torch.add, (node.args[0], call(torch.mul, (node.args[1], -1.0))))
    return None


def _transposed(traced: fx.GraphModule, node: fx.Node, module: Any, shape: Shape) -> fx.Node | None:
    """A transposed convolution as a convolution with one group of output channels for every position in a stride, which are
    then interleaved.

    With stride s, output i reads the taps k = (i + padding) % s, s + k, 2 s + k ...: they are a dense kernel.
    """
    if module.padding_mode != "zeros" or set(module.dilation) != {1} or len(shape) != 4:
        return None
    kernel, stride, padding, extra = module.kernel_size, module.stride, module.padding, module.output_padding
    taps = [-(-k // s) for k, s in zip(kernel, stride, strict=True)]
    margin = [t - 1 + (e > p) for t, e, p in zip(taps, extra, padding, strict=True)]  # more, if the last pixels are the bias alone
    channels = -(-module.out_channels // LANES) * LANES
    dense = _dense(module)
    weight = torch.zeros(stride[0], stride[1], channels, module.in_channels, *taps)
    for row in range(stride[0]):
        for column in range(stride[1]):
            part = dense[:, :, row :: stride[0], column :: stride[1]].flip(2, 3).transpose(0, 1)
            weight[row, column, : len(part), :, taps[0] - part.shape[2] :, taps[1] - part.shape[3] :] = part
    bias = torch.zeros(stride[0] * stride[1], channels)
    if module.bias is not None:
        bias[:, : module.out_channels] = module.bias
    layer = nn.Conv2d(module.in_channels, bias.numel(), tuple(taps), padding=tuple(margin)).requires_grad_(False)
    layer.weight.data, layer.bias.data = weight.flatten(0, 2), bias.flatten()  # type: ignore[union-attr]
    name = f"{node.name}_phases"
    traced.add_submodule(name, layer)
    starts = tuple((m - t + 1) * s + p for m, t, s, p in zip(margin, taps, stride, padding, strict=True))
    phases = traced.graph.call_module(name, node.args)
    return traced.graph.call_function(interleave, (phases, tuple(stride), starts, shape[2:], module.out_channels))


def _dense(module: nn.ConvTranspose2d) -> torch.Tensor:
    """The weight of a transposed convolution without groups, [in, out, rows, columns]."""
    parts = module.weight.detach().chunk(module.groups)
    outputs = parts[0].shape[1]
    return torch.cat([F.pad(part, (0, 0, 0, 0, i * outputs, (len(parts) - 1 - i) * outputs)) for i, part in enumerate(parts)])


def _padded(traced: fx.GraphModule, node: fx.Node, module: Any, shape: Shape) -> fx.Node | None:
    """A convolution that pads with something else than zeros: first the padding, then the convolution."""
    if module.padding_mode == "zeros":
        return None
    name, plain = f"{node.name}_unpadded", copy.deepcopy(module)
    plain.padding, plain.padding_mode = 0, "zeros"
    traced.add_submodule(name, plain)
    settings = list(module._reversed_padding_repeated_twice), module.padding_mode
    return traced.graph.call_module(name, (traced.graph.call_function(F.pad, (*node.args, *settings)),))


def _slopes(traced: fx.GraphModule, node: fx.Node, module: nn.PReLU, shape: Shape) -> fx.Node | None:
    """A PReLU with one slope per channel."""
    if module.num_parameters == 1:
        return None
    call, name = traced.graph.call_function, f"{node.name}_slopes"
    traced.register_buffer(name, module.weight.detach().reshape(-1, *[1] * (len(shape) - 2)))
    negative = call(torch.clamp, node.args, {"max": 0.0})
    return call(torch.add, (call(F.relu, node.args), call(torch.mul, (negative, traced.graph.get_attr(name)))))


def _selu(traced: fx.GraphModule, node: fx.Node, module: nn.SELU, shape: Shape) -> fx.Node:
    alpha, scale = 1.6732632423543772, 1.0507009873554805  # as in torch
    return traced.graph.call_function(torch.mul, (traced.graph.call_function(F.elu, (*node.args, alpha)), scale))


MODULES: dict[type[nn.Module], Callable[..., fx.Node | None]] = {
    nn.Conv1d: _padded,
    nn.Conv2d: _padded,
    nn.ConvTranspose2d: _transposed,
    nn.PReLU: _slopes,
    nn.SELU: _selu,
}
SUBTRACTIONS = (
    ("call_function", operator.sub),
    ("call_function", operator.isub),
    ("call_function", torch.sub),
    ("call_method", "sub"),
)
