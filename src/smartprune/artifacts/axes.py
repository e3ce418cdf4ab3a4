"""The order of the axes of stored matrices. Linear layers store (out, in), and layers such as Conv1D store (in, out)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..core.block import Layout
from ..core.layers import candidates, plain_name

if TYPE_CHECKING:
    from .counts import Row
    from .source import Source


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
    """Whether the bias next to a stored matrix has one entry per column, and not one per row: the matrix is (in, out)."""
    stem, _, attribute = key.rpartition(".")
    weight, bias = tensors[key], tensors.get(f"{stem}.bias" if stem else "bias")
    if attribute != "weight" or bias is None or bias.dim() != 1 or weight.dim() != 2 or weight.shape[0] == weight.shape[1]:
        return False
    return bias.numel() == weight.shape[1]
