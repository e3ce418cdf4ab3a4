"""Work lists of the fused multiplication: how weights are divided into programs, and where each program finds its blocks.

A weight is seen as rows by columns in the order of memory (``multiply.Rows``). One program handles one row of blocks and a stretch
of columns that holds whole blocks only, so that no block is summed by two programs. The tables depend on shapes, strides and blocks
alone, so they are made once and stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.block import Grid, spread

TILE = 4096  # elements that a program holds at once
ROWS = 8  # the most rows among them
SUMMED = 512  # column sums that a program adds up to block sums at once
PITCH = 256  # outputs of a run start at multiples of this number of elements: 512 bytes or more
EVEN = 8  # stretches that start and end at multiples of this are read and written 16 bytes at a time
FIELDS = 14  # entries per program, in the order of Work._programs

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """One layer of a run: its grid, the order of its axes in memory, and where its blocks start in the mask."""

    grid: Grid
    order: tuple[int, ...]
    start: int


class Work:
    """The programs of one launch over several layers."""

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        heights = [place.grid.axes[0].step for place in places]
        widths = [math.prod(place.grid.weight_shape[1:]) for place in places]
        self.rows = min(ROWS, _power(max(heights)))
        self.columns = max(16, min(TILE // self.rows, _power(max(widths))))
        self.offsets: list[int] = []
        self.size = 0  # elements of the flat output
        self.space = 0  # float32 scratch entries that the block sums need
        programs: list[Ints] = []
        index: list[Ints] = []
        filled, longest = 0, 1
        for number, place in enumerate(places):
            table, lists, most = self._programs(number, place, filled)
            programs.append(table)
            index.append(lists)
            filled += len(lists)
            longest = max(longest, most)
            self.offsets.append(self.size)
            self.size += -(-math.prod(place.grid.weight_shape) // PITCH) * PITCH
        self.members = min(max(SUMMED // 8, 1), _power(longest))
        self.slots = SUMMED // self.members
        self.count = sum(map(len, programs))
        self.table: Tensor = torch.from_numpy(np.concatenate(programs)).to(device)
        self.index: Tensor = torch.from_numpy(np.concatenate(index).astype(np.int32)).to(device)

    def _programs(self, number: int, place: Place, at: int) -> tuple[Ints, Ints, int]:
        """One row per program, the layer's lists of columns (they start at ``at``), and the most columns of a block."""
        first = place.grid.axes[0]
        block = _columns(place)  # for every column: the index of its block within the row of blocks
        width = len(block)
        counts = np.bincount(block)
        head = np.full(len(counts), width)  # for every block: its first and last column
        np.minimum.at(head, block, np.arange(width))
        last = np.zeros(len(counts), np.int64)
        np.maximum.at(last, block, np.arange(width))
        slot_block = np.argsort(head, kind="stable")  # blocks in the order of their first columns
        rank = np.argsort(slot_block)
        members = np.argsort(rank[block], kind="stable")
        slot_start = np.concatenate([[0], np.cumsum(counts[slot_block])])
        heads = head[slot_block]
        lists = np.concatenate([block, members, slot_start + at + width, slot_block])

        cuts = _stretches(block, last, self.columns)
        begin, end = cuts[:-1], cuts[1:]
        slot = np.searchsorted(heads, begin)
        slots = np.searchsorted(heads, end) - slot
        row = (np.arange(first.parts)[:, None] * first.length + np.arange(first.per_part) * first.step).reshape(-1)
        rows = np.array(first.lengths())
        base = place.start + np.arange(first.count) * (place.grid.n // first.count)
        even = (begin % EVEN == 0) & (end % EVEN == 0) & (width % EVEN == 0)
        n, m = len(row), len(begin)
        scratch = self.space + np.arange(n)[:, None] * width + begin
        self.space += n * width
        fields = [
            number,
            row[:, None],
            rows[:, None],
            begin,
            end,
            width,
            base[:, None],
            at,  # list: the block of every column
            at + 2 * width + slot,  # list: where the columns of each block of the stretch start
            at + 2 * width + len(slot_block) + 1 + slot,  # list: the index of each block
            slots,
            self.size // PITCH,
            scratch,
            even,
        ]
        table = np.stack([np.broadcast_to(np.asarray(field, np.int64), (n, m)) for field in fields], axis=-1)
        return table.reshape(-1, FIELDS), lists, int(counts.max())


def _columns(place: Place) -> Ints:
    axes = [place.grid.axes[i] for i in place.order[1:]]
    stored = place.grid.shape[1:]
    out = torch.arange(math.prod(stored), device="cpu").reshape(stored).permute([i - 1 for i in place.order[1:]])
    for i, axis in enumerate(axes):
        out = spread(out, i, axis)
    return out.reshape(-1).numpy()


def _stretches(block: Ints, last: Ints, most: int) -> Ints:
    """Where to cut the columns, [0, ..., width]: between blocks only, and at most ``most`` apart if the blocks allow it.

    ``last`` is the last column of every block.
    """
    width = len(block)
    allowed = np.flatnonzero(np.maximum.accumulate(last[block]) == np.arange(width)) + 1
    out = _greedy(allowed, most)
    low, high = 1, most
    while low < high:  # the shortest limit that needs no more stretches, which makes them even
        middle = (low + high) // 2
        fewer = _greedy(allowed, middle)
        if len(fewer) <= len(out):
            out, high = fewer, middle
        else:
            low = middle + 1
    return np.array(out)


def _greedy(allowed: Ints, most: int) -> list[int]:
    out = [0]
    while out[-1] < allowed[-1]:
        reach = int(np.searchsorted(allowed, out[-1] + most, side="right")) - 1
        after = int(np.searchsorted(allowed, out[-1], side="right"))
        out.append(int(allowed[max(reach, after)]))
    return out


def _power(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
