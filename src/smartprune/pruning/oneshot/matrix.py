"""Weights as matrices, and the inputs of a layer as the rows that these matrices multiply.

Every weight with blocks is a stack of matrices, [parts, outputs, inputs]: one part per group of a convolution, for query, key and
value, or per gate of a recurrent cell. One output of a layer at one position is a row of ``outputs`` numbers, computed from a row
of ``inputs`` numbers: the pixels below the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.layers import Layer

Pick = Callable[[int], Tensor | None]  # number of rows -> indices of those to take; None: all


def as_matrices(weight: Tensor, parts: int, transposed: bool) -> Tensor:
    """A weight-shaped tensor as [parts, outputs, inputs]. The inputs are in the order (input channel, kernel).

    >>> as_matrices(torch.zeros(6, 4, 3, 3), 2, False).shape
    torch.Size([2, 3, 36])
    >>> as_matrices(torch.zeros(6, 4, 3, 3), 2, True).shape  # of a transposed convolution: (in, out / groups, *kernel)
    torch.Size([2, 4, 27])
    """
    split: Tensor = weight.unflatten(0, (parts, weight.shape[0] // parts))
    out: Tensor = split.transpose(1, 2) if transposed else split
    return out.flatten(2)


def as_weight(matrices: Tensor, shape: Sequence[int], transposed: bool) -> Tensor:
    """Undoes :func:`as_matrices`."""
    parts, (first, second, *kernel) = matrices.shape[0], shape
    if not transposed:
        return matrices.reshape(first, second, *kernel)
    return matrices.reshape(parts, second, first // parts, *kernel).transpose(1, 2).reshape(first, second, *kernel)


@dataclass(frozen=True)
class Tiles:
    """The blocks of a layer, on its matrices.

    Attributes:
        index: The block of each pair of a row group and a column group, int64 [parts, row groups, column groups].
        rows: The outputs of each row group, int64 [row groups, step]; -1 where a partial group has fewer.
        columns: The inputs of each column group, in the same form.
    """

    index: Tensor
    rows: Tensor
    columns: Tensor

    @staticmethod
    def of(layer: Layer) -> Tiles:
        parts = layer.grid.axes[0].parts
        numbers = torch.arange(layer.n, dtype=torch.int64, device="cpu")
        ids = as_matrices(layer.grid.expand(numbers), parts, layer.transposed)
        rows, first_rows = _groups(ids[0, :, 0])
        columns, first_columns = _groups(ids[0, 0, :])
        return Tiles(ids[:, first_rows][:, :, first_columns].contiguous(), rows, columns)


def _groups(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The members of each distinct value, in the order of their first members, padded with -1; and the first members."""
    order = ids.argsort(stable=True)
    _, counts = ids[order].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    members = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int64, device="cpu")
    for i, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        members[i, :count] = order[end - count : end]
    by_first = members[:, 0].argsort()
    return members[by_first], members[by_first, 0]


# -- rows of inputs ---------------------------------------------------------------------------------------------------------


def linear_rows(x: Tensor, pick: Pick) -> Tensor:
    """The inputs of a linear layer, [1, rows, inputs]."""
    rows = x.reshape(-1, x.shape[-1])
    chosen = pick(rows.shape[0])
    return (rows if chosen is None else rows[chosen])[None]


@dataclass(frozen=True)
class Geometry:
    """The arguments of a convolution that decide which inputs an output reads, one entry per axis of the kernel."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]
    groups: int
    transposed: bool


def conv_rows(x: Tensor, geometry: Geometry, pick: Pick) -> Tensor:
    """The inputs of a convolution at every output position, [groups, rows, inputs]."""
    axes = len(geometry.kernel)
    if x.dim() == axes + 1:
        x = x[None]
    stride = geometry.stride
    if geometry.transposed:
        x, stride = _spaced(x, stride), (1,) * axes
    padding = [size for pair in reversed(geometry.padding) for size in pair]
    x = F.pad(x, padding) if any(padding) else x
    x = x.contiguous()
    sizes = [
        (length - step * (k - 1) - 1) // s + 1
        for length, k, step, s in zip(x.shape[2:], geometry.kernel, geometry.dilation, stride, strict=True)
    ]
    steps = x.stride()
    view = x.as_strided(
        (x.shape[0], *sizes, x.shape[1], *geometry.kernel),
        (
            steps[0],
            *(a * b for a, b in zip(steps[2:], stride, strict=True)),
            steps[1],
            *(a * b for a, b in zip(steps[2:], geometry.dilation, strict=True)),
        ),
    )
    positions = view.shape[: axes + 1]
    chosen = pick(math.prod(positions))
    rows = view.flatten(0, axes) if chosen is None else view[torch.unravel_index(chosen, positions)]
    if geometry.transposed:
        rows = rows.flip(tuple(range(2, 2 + axes)))
    return rows.reshape(rows.shape[0], geometry.groups, -1).transpose(0, 1)


def _spaced(x: Tensor, stride: Sequence[int]) -> Tensor:
    """``x`` with ``stride - 1`` zeros between its positions: a transposed convolution is an ordinary one on that."""
    if all(step == 1 for step in stride):
        return x
    sizes = [(length - 1) * step + 1 for length, step in zip(x.shape[2:], stride, strict=True)]
    out = x.new_zeros(*x.shape[:2], *sizes)
    out[(slice(None), slice(None), *(slice(None, None, step) for step in stride))] = x
    return out
