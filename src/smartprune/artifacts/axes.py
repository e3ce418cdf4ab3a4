"""The order of the axes of stored matrices. Linear layers store (out, in), and layers such as Conv1D store (in, out)."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .. import text
from ..core.block import Layout
from ..core.layers import candidates, plain_name

if TYPE_CHECKING:
    from .counts import Row
    from .source import Source

SHOWN = 3  # names in a message


def inputs_first(layers: Iterable[Row]) -> set[str]:
    """The matrices of a receipt that are stored as (in, out)."""
    return {plain_name(row.weight) for row in layers if row.transposed and len(row.shape) == 2}


def inputs_first_in(network: nn.Module) -> set[str]:
    """The matrices of a network that are stored as (in, out)."""
    users = [user for user in candidates(network) if user.supported and not user.lazy]
    return {plain_name(user.weight_name) for user in users if user.transposed and user.weight.dim() == 2}


def swap_axes(source: Source, names: Collection[str]) -> Source:
    """An ONNX file with these matrices as (in, out). The file does not say how the model stored them, and is read as (out, in)."""
    if not source.rounded or not names:
        return source
    swapped = {
        name: Layout(layout.name, layout.kind, layout.shape[::-1], transposed=True)
        for name, layout in source.layouts.items()
        if plain_name(name) in names and len(layout.shape) == 2 and not layout.transposed
    }
    tensors = {name: tensor.t() if name in swapped else tensor for name, tensor in source.tensors.items()}
    return replace(source, tensors=tensors, layouts={**source.layouts, **swapped})


def swapped(tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """The tensors with these matrices as (in, out), from a graph that is read as (out, in)."""
    return {name: tensor.t() if name in names and tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


def bias_says_inputs_first(key: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the bias of a stored matrix has one entry per column instead of one per row, so that the matrix is (in, out)."""
    stem, _, attribute = key.rpartition(".")
    weight, bias = tensors[key], tensors.get(f"{stem}.bias" if stem else "bias")
    if attribute != "weight" or bias is None or bias.dim() != 1 or weight.dim() != 2 or weight.shape[0] == weight.shape[1]:
        return False
    return bias.numel() == weight.shape[1]


def assumed_axes_lines(
    assumed: Sequence[str], width: int, remedy: str = "give the model, by model= or --model NAME", mark: str = ""
) -> list[str]:
    """Lines that name the weights whose axes were assumed; empty if there are none. ``mark`` is their mark in a table."""
    if not assumed:
        return []
    names = ", ".join(map(text.escape, assumed[:SHOWN])) + (", ..." if len(assumed) > SHOWN else "")
    count = "1 weight" if len(assumed) == 1 else f"{len(assumed)} weights"
    message = (
        f"{mark}the axes of {count} are assumed to be (out, in, ...), without groups, because it is not known which layers are "
        f"transposed or grouped: {names}. To be sure, {remedy}"
    )
    return ["", *textwrap.wrap(message, width, break_on_hyphens=False)]
