"""The kept part of a weight in the form that the kernels read: entries of a few input channels by 16 or 8 output channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LANES = 16  # channels of an activation block
OVERHEAD = 0.35  # cost of an entry besides its products, in vector products per pixel
HALF = 0.75  # cost of a vector of 8 relative to one of 16: from 0.5 to 1, depending on the machine

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Entries:
    """Entries sorted by (group of output channels, kernel position, input channels).

    ``start`` [groups + 1] holds the first entry of every group. An entry is ``inner`` input channels from ``channel`` on, at
    kernel position ``row``, ``column``. Its ``values`` are [inner, lanes] with the output channel fastest, padded with zeros.
    """

    lanes: int
    inner: int
    start: Ints
    channel: Ints
    row: Ints
    column: Ints
    values: Floats

    @property
    def count(self) -> int:
        return len(self.channel)

    @property
    def groups(self) -> int:
        return len(self.start) - 1

    @property
    def cost(self) -> float:
        """Vector products per pixel, including the overhead of entries."""
        return self.count * (self.inner * (1.0 if self.lanes == LANES else HALF) + OVERHEAD)


def cut(weight: Floats, lanes: Sequence[int], multiple: int = 1) -> Entries:
    """The entries of a weight [out, in, rows, columns], with the entry shape that costs least.

    All zeros count, whatever block shape was pruned. The number of input channels of an entry is a multiple of ``multiple``,
    the number that one instruction multiplies.
    """
    inputs = weight.shape[1]
    sizes = [size for size in (8, 4, 2, 1, *([3] if inputs == 3 else [])) if size % multiple == 0]
    shapes = [(width, size) for width in lanes for size in sizes]
    nonzero = weight != 0
    best, least = shapes[0], np.inf
    for width, inner in shapes:
        count = int(_kept(nonzero, width, inner).sum())
        cost = count * (inner / multiple * (1.0 if width == LANES else HALF) + OVERHEAD)
        if cost < least:
            best, least = (width, inner), cost
    return _cut(weight, nonzero, *best)


def _tiled(array: npt.NDArray[np.generic], width: int, inner: int) -> npt.NDArray[np.generic]:
    """[groups, width, channel groups, inner, rows, columns], padded."""
    o, i, h, w = array.shape
    o_pad, i_pad = -o % width, -i % inner
    if o_pad or i_pad:
        array = np.pad(array, ((0, o_pad), (0, i_pad), (0, 0), (0, 0)))
    return array.reshape((o + o_pad) // width, width, (i + i_pad) // inner, inner, h, w)


def _kept(nonzero: npt.NDArray[np.bool_], width: int, inner: int) -> npt.NDArray[np.bool_]:
    """[groups, rows, columns, channel groups]: which entries are not all zero."""
    kept: npt.NDArray[np.bool_] = np.any(_tiled(nonzero, width, inner), axis=(1, 3))
    return kept.transpose(0, 2, 3, 1)


def _cut(weight: Floats, nonzero: npt.NDArray[np.bool_], width: int, inner: int) -> Entries:
    kept = _kept(nonzero, width, inner)
    group, row, column, channel = (index.astype(np.int32) for index in np.nonzero(kept))
    tiled = _tiled(weight, width, inner)
    values = tiled[group, :, channel, :, row, column]  # [entries, width, inner]
    start = np.zeros(kept.shape[0] + 1, np.int32)
    np.cumsum(np.bincount(group, minlength=kept.shape[0]), out=start[1:])
    return Entries(width, inner, start, channel * np.int32(inner), row, column, np.ascontiguousarray(values.transpose(0, 2, 1)))
