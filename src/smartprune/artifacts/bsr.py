"""One pruned weight as a block-sparse matrix of torch (BSR)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from .. import text
from ..core.block import Block
from ..core.kinds import is_masked
from ..core.layers import plain_name
from ..errors import SmartpruneError
from .receipt import AnyReceipt, as_receipt, receipt_of
from .source import Cut, Model, read_source


def bsr(
    model: Model,
    layer: str,
    block: Block | str | Sequence[int | None] | None = None,
    receipt: AnyReceipt | None = None,
    *,
    channels_last: bool = False,
) -> Tensor:
    """One weight as a ``torch.sparse_bsr`` matrix of shape (outputs, inputs * kernel), without its zero blocks.

    A convolution is the product of this matrix with the columns of ``torch.nn.functional.unfold``. A BSR block is a rectangle of
    neighbouring columns, so the columns of a block must lie next to each other. In the default order, which is
    ``weight.flatten(1)``, this holds for linear layers, 1x1 convolutions, and blocks that span the whole kernel. With
    ``channels_last``, the columns are the columns of ``weight.movedim(1, -1).flatten(1)``: the kernel position comes first, then
    the input channel. Blocks of one kernel position, such as (16, 8), then fit.

    Args:
        model: A baked or any other plain model, a state dict, a file or a run folder.
        layer: The name of the layer or of its weight.
        block: The size of a block. Defaults to the block of the receipt, of the packed file, or of the pruning in this process.
        receipt: A receipt, its JSON data or its path. Only its block and its axes are used.
        channels_last: Whether the kernel position comes before the input channel.

    Returns:
        The matrix. Its values are copies. With groups, the columns are the inputs of one group, as PyTorch stores the weight.

    Raises:
        SmartpruneError: There is no such layer, or its blocks are not equal rectangles of the matrix.

    Examples:
        >>> import smartprune as sp
        >>> import torch
        >>> weight = torch.zeros(32, 16, 3, 3)
        >>> weight[:16, 8:, 1, 1] = 1
        >>> matrix = sp.bsr({"conv.weight": weight}, "conv", (16, 8), channels_last=True)
        >>> matrix.shape, matrix.values().shape, matrix.col_indices()
        (torch.Size([32, 144]), torch.Size([1, 16, 8]), tensor([9]))
    """
    if isinstance(model, nn.Module) and any(is_masked(module) for module in model.modules()):
        raise SmartpruneError("bsr: the model is still being pruned; call smartprune.bake(model) first")
    if not isinstance(layer, str):
        raise SmartpruneError(f"bsr: layer={text.show(layer)} is not a name; give the name of a layer, such as 'conv1'")
    source = read_source(model)
    known = source.receipt if receipt is None else as_receipt(receipt, "bsr")
    if known is None and block is None and isinstance(model, nn.Module):
        known = receipt_of(model)
    source = replace(source, receipt=known)
    default = source.block if known is None else known.block
    if block is None and default is None:
        raise SmartpruneError("bsr: no block was given and there is no receipt; give block=, such as (16, 8)")
    cut = _find(source.cuts(Block.of(default if block is None else block))[0], layer)  # type: ignore[arg-type]
    weight, steps = _outputs_first(cut)
    order = [*range(2, weight.dim()), 1] if channels_last else list(range(1, weight.dim()))
    columns = _neighbours([weight.shape[axis] for axis in order], [steps[axis] for axis in order])
    if columns is None:
        hint = "the blocks span several kernel positions, but not all: prune with blocks of one position, or of the whole kernel"
        if not channels_last and all(step == 1 for step in steps[2:]):
            hint = "channels_last=True puts them next to each other"
        raise SmartpruneError(
            f"bsr: the columns of a block of {text.format_shape(steps)} are not adjacent in the matrix of {cut.weight} "
            f"({text.format_shape(weight.shape)}); {hint}"
        )
    if weight.is_meta:
        raise SmartpruneError(f"bsr: {cut.weight} is on the meta device and has no values; load the model first")
    matrix = weight.permute(0, *order).flatten(1)
    if any(length % step for length, step in zip(weight.shape, steps, strict=True)):
        raise SmartpruneError(
            f"bsr: blocks of {text.format_shape(steps)} do not divide {cut.weight} ({text.format_shape(weight.shape)}), and torch "
            "has no partial blocks; use pack, which pads them, or a block that divides the weight"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: "Sparse BSR tensor support is in beta state"
        return matrix.contiguous().to_sparse_bsr((steps[0], columns))


def _find(cuts: Sequence[Cut], layer: str) -> Cut:
    for cut in cuts:
        if plain_name(layer) in (plain_name(cut.name), plain_name(cut.weight)):
            return cut
    names = text.some_names([cut.name for cut in cuts], 12)
    raise SmartpruneError(f"bsr: there is no layer {layer!r} with blocks; the layers are: {names or 'none'}")


def _outputs_first(cut: Cut) -> tuple[Tensor, list[int]]:
    """The weight as (out, in, *kernel), and the size of a block along each axis."""
    weight, axes = cut.tensor.detach(), list(cut.grid.axes)
    if axes[0].parts > 1 and (cut.transposed or axes[0].length % axes[0].step):
        reason = "is transposed and grouped" if cut.transposed else f"has groups of {axes[0].length} outputs"
        raise SmartpruneError(
            f"bsr: {cut.weight} {reason}, so its blocks do not lie on one regular grid; give a state dict with the weight of one "
            "group, which weight.chunk(groups) returns"
        )
    steps = [axis.step for axis in axes]
    if cut.transposed:
        weight, steps = weight.transpose(0, 1), [steps[1], steps[0], *steps[2:]]
    return weight, steps


def _neighbours(lengths: Sequence[int], steps: Sequence[int]) -> int | None:
    """How many neighbouring entries of the flattened axes a block covers; None if they are not neighbours."""
    first = next((axis for axis, step in enumerate(steps) if step > 1), len(steps))
    return None if list(lengths[first + 1 :]) != list(steps[first + 1 :]) else math.prod(steps)
