"""Operations that only move numbers: reshaping, permuting, slicing, padding, repeating.

torch runs the operation on the positions of the numbers instead of the numbers, so its arguments need no code here. A chain of
such operations becomes one step that reads the first value of the chain.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .context import Context
from .one_dimension import is_elementwise
from .steps import Step

METHODS = frozenset(  # also the names of functions of torch and of ATen operations
    (
        *("chunk", "contiguous", "expand", "expand_as", "flatten", "flip", "movedim", "narrow", "permute", "repeat"),
        *("repeat_interleave", "reshape", "reshape_as", "roll", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tile"),
        *("transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"),
    )
)
ATEN = METHODS | {"clone", "pad", "pixel_shuffle", "pixel_unshuffle", "slice", "channel_shuffle"}
MODULES = (
    nn.Flatten,
    nn.Unflatten,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    nn.ZeroPad2d,
    nn.ConstantPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.CircularPad2d,
    nn.ZeroPad1d,
    nn.ConstantPad1d,
    nn.ReflectionPad1d,
    nn.ReplicationPad1d,
    nn.Upsample,
    nn.UpsamplingNearest2d,
)
NEAREST = ("nearest", "nearest-exact")


def interleave(x: Tensor, strides: tuple[int, int], starts: tuple[int, int], sizes: tuple[int, int], channels: int) -> Tensor:
    """Phases in the channels, [images, rows * columns * channels, ...], as neighbouring pixels: part of the result."""
    (rows, columns), (n, c, h, w) = strides, x.shape
    grid = x.reshape(n, rows, columns, c // (rows * columns), h, w).permute(0, 3, 4, 1, 5, 2)
    full = grid.reshape(n, -1, h * rows, w * columns)
    return full[:, :channels, starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]]


def move(context: Context, node: fx.Node) -> Step | None:
    """The step of a node that only moves numbers; None if it does more, or if torch does not run it on positions."""
    shape = context.shape(node)
    if shape is None or len(shape) < 2 or not all(shape):
        return None
    try:
        (source, positions), (_, doubled) = (_positions(context, node, factor) for factor in (1, 2))
    except (TypeError, ValueError, RuntimeError, NotImplementedError, KeyError, IndexError, AttributeError):
        return None
    if source is node or not isinstance(positions, Tensor) or tuple(positions.shape) != shape:
        return None
    if not torch.equal(doubled, 2 * positions):  # it writes a number of its own, as padding does
        return None
    index = positions.numpy().astype(np.int64) - 1
    if (index != positions.numpy() - 1).any() or index.min() < -1:
        return None
    return Step("gather", node, [source], _is_read_as_rows(context, node), index=index)


def _is_read_as_rows(context: Context, node: fx.Node) -> bool:
    """Whether the last axis of a result holds channels, as linear layers read them."""
    shape = context.shapes[node]
    if len(shape) == 3:
        return node not in context.maps
    return len(shape) > 4 or (len(shape) == 4 and _reaches_linear(context, node))


def _reaches_linear(context: Context, node: fx.Node) -> bool:
    for user in node.users:
        module = context.modules.get(str(user.target)) if user.op == "call_module" else None
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            return True
        if context.shape(user) == context.shape(node) and is_elementwise(user, module) and _reaches_linear(context, user):
            return True
    return False


def _positions(context: Context, node: fx.Node, factor: int) -> tuple[fx.Node, Any]:
    """The value that the numbers come from, and their positions there times a factor, counted from one. Zero is the number zero."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    call = None if source is None else _function(context, node)
    if call is None or source is None:
        shape = context.shapes[node]
        return node, factor * torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.float64, device="cpu").reshape(shape)
    first, values = _positions(context, source, factor)

    def value(argument: fx.Node) -> Any:  # other tensors give their shape alone
        return values if argument is source else torch.zeros(1, device="cpu").expand(context.shapes[argument])

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    return first, call(*args, **kwargs)


def _function(context: Context, node: fx.Node) -> Any:
    """What a node calls, if it moves numbers."""
    if node.op == "call_module":
        module = context.modules[str(node.target)]
        hooked = module._forward_hooks or module._forward_pre_hooks
        nearest = getattr(module, "mode", "nearest") in NEAREST
        return module if type(module) in MODULES and nearest and not hooked else None
    if node.op == "call_method":
        return getattr(Tensor, str(node.target)) if node.target in METHODS else None
    if node.target is F.interpolate and node.kwargs.get("mode", "nearest") not in NEAREST:
        return None
    known = node.target in FUNCTIONS
    if isinstance(node.target, torch._ops.OpOverload):  # its name is aten::name
        known = node.target._schema.name.partition("::")[2] in ATEN
    return node.target if node.op == "call_function" and known else None


FUNCTIONS = {
    *(getattr(torch, name) for name in METHODS if hasattr(torch, name)),
    *(F.pad, F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, F.interpolate, operator.getitem, interleave),
}
