"""A weight as tiles: its blocks in the order in which a kernel walks them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.block import Axis, Grid


def tile_shape(grid: Grid, transposed: bool) -> tuple[int, ...]:
    """Rows of blocks, columns of blocks, then one block as (*kernel, in, out)."""
    out, into, *kernel = _axes(grid, transposed)
    columns = math.prod(axis.per_part for axis in kernel) * into.per_part
    return (grid.axes[0].parts * out.per_part, columns, *(axis.step for axis in kernel), into.step, out.step)


def to_tiles(weight: Tensor, grid: Grid, transposed: bool) -> Tensor:
    """A weight as [rows, columns, *kernel, in, out]. Edge blocks are padded with zeros."""
    axes, parts = _axes(grid, transposed), grid.axes[0].parts
    tiles: Tensor = weight.unflatten(0, (parts, grid.axes[0].length))
    tiles = tiles.transpose(1, 2) if transposed else tiles
    for dim, axis in enumerate(axes, 1):
        padding = axis.per_part * axis.step - axis.length
        if padding:
            tiles = torch.cat([tiles, tiles.new_zeros(*tiles.shape[:dim], padding, *tiles.shape[dim + 1 :])], dim)
    tiles = tiles.reshape(parts, *(n for axis in axes for n in (axis.per_part, axis.step)))
    return tiles.permute(_permutation(len(axes))).reshape(tile_shape(grid, transposed))


def from_tiles(tiles: Tensor, grid: Grid, transposed: bool) -> Tensor:
    """The inverse of :func:`to_tiles`."""
    axes, parts = _axes(grid, transposed), grid.axes[0].parts
    permutation = _permutation(len(axes))
    sizes = [parts, *(n for axis in axes for n in (axis.per_part, axis.step))]
    inverse = [permutation.index(i) for i in range(len(permutation))]
    weight: Tensor = tiles.reshape([sizes[i] for i in permutation]).permute(inverse)
    weight = weight.reshape(parts, *(axis.per_part * axis.step for axis in axes))
    for dim, axis in enumerate(axes, 1):
        weight = weight.narrow(dim, 0, axis.length)
    weight = weight.transpose(1, 2) if transposed else weight
    return weight.flatten(0, 1).contiguous()


def _axes(grid: Grid, transposed: bool) -> tuple[Axis, ...]:
    """The axes as (out, in, *kernel)."""
    first, second, *kernel = grid.axes
    return (second, first, *kernel) if transposed else (first, second, *kernel)


def _permutation(axes: int) -> list[int]:
    """From (group, then count and step of out, in, *kernel) to (group, out, *kernel, in; *kernel, in, out)."""
    kernel = range(5, 1 + 2 * axes, 2)
    return [0, 1, *kernel, 3, *(i + 1 for i in kernel), 4, 2]
