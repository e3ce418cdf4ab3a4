"""The tables of a gather: where the numbers of its result lie in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arena import Value
from .entries import LANES


def positions(index: Any, x: Value, y: Value) -> list[Any]:
    """For every image, channel, row and column of ``y`` a position in ``x``, int32, such that their sum is the position of the
    number. It is -1 where the result is zero. If there are no such tables, one table has the positions of all numbers.

    ``index`` holds the position of every number of ``y`` among those of ``x``, in the order of the tensors, or -1 for zero.
    """
    at = np.where(index < 0, -1, _memory(index, x))
    at = at.reshape(-1, y.channels).T[None, :, None, :] if y.rows else at.reshape(y.images, y.channels, y.height, y.width)
    kept = at >= 0
    if not kept.any():
        return [np.full(max(size, LANES), -1, np.int32) for size in (y.images, y.blocks * LANES, y.height, y.width)]
    start = np.unravel_index(np.where(kept, at, np.iinfo(np.int64).max).argmin(), at.shape)
    tables, total, all_kept = [], np.zeros((1, 1, 1, 1), np.int64), np.ones((1, 1, 1, 1), bool)
    for axis, size in enumerate(at.shape):
        others = tuple(other for other in range(4) if other != axis)
        line = at[tuple(slice(None) if other == axis else start[other] for other in range(4))]
        table = np.where(kept.any(axis=others), line - (at[start] if axis else 0), -1)
        tables.append(table)
        shape = [size if other == axis else 1 for other in range(4)]
        total, all_kept = total + table.reshape(shape), all_kept & (table >= 0).reshape(shape)
    if (all_kept != kept).any() or (total != at)[kept].any():
        return [_one_table(at, y)]
    channels = np.full(y.blocks * LANES, -1, np.int64)
    channels[: y.channels] = tables[1]
    return [table.astype(np.int32) for table in (tables[0], channels, tables[2], tables[3])]


def _one_table(at: Any, y: Value) -> Any:
    """[images, blocks, rows, columns, channels of a block]"""
    images, channels, height, width = at.shape
    full = np.full((images, y.blocks * LANES, height, width), -1, np.int32)
    full[:, :channels] = at
    return full.reshape(images, y.blocks, LANES, height, width).transpose(0, 1, 3, 4, 2)


def _memory(index: Any, x: Value) -> Any:
    """The distance of numbers of ``x`` from its first pixel, from their positions in the order of the tensor."""
    if x.rows:
        column, channel = np.divmod(index, x.channels)
        image = row = 0
    else:
        rest, column = np.divmod(index, x.width)
        rest, row = np.divmod(rest, x.height)
        image, channel = np.divmod(rest, x.channels)
    return image * x.image + channel // LANES * x.plane + row * x.row + column * LANES + channel % LANES
