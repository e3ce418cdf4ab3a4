"""How the output of a convolution is divided into tiles, and the tiles into chunks that threads work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..lower.steps import Step
from .arena import Value
from .entries import LANES, Entries

CHUNK_BYTES = 256 << 10  # of input that one chunk reads: it stays in the second-level cache
HEIGHTS = (8, 4, 2, 1)  # of a tile, in segments
MOST_PIXELS_STRIDED = 8  # of a tile, if a kernel reads every second pixel


@dataclass(frozen=True)
class Tiling:
    """The tiles of a convolution: runs of equal tiles, chunks of runs, and where the segments of the tiles start."""

    runs: Any  # [runs, 3]: kernel, first segment, number of tiles
    chunk_start: Any  # [chunks + 1]: first run of every chunk
    starts: dict[str, Any]  # per tensor, [segments]: first pixel of every segment

    @property
    def chunks(self) -> int:
        return len(self.chunk_start) - 1


def tile(step: Step, x: Value, y: Value, z: Value | None, element_bytes: int, most_pixels: int, threads: int) -> Tiling:
    """Divides every row of the output into segments of about equal width, and segments of neighbouring rows into tiles.

    ``element_bytes`` is the size of a number of x, and ``most_pixels`` the largest tile of the instruction set.
    """
    stride = step.window["sw"]
    widest = most_pixels if stride == 1 else min(most_pixels, MOST_PIXELS_STRIDED) if stride == 2 else 1
    pieces = -(-y.width // widest)
    edges = [y.width * i // pieces for i in range(pieces + 1)]
    tallest = max(height for height in HEIGHTS if height == 1 or height * -(-y.width // pieces) <= most_pixels)
    row_bytes = x.blocks * x.width * LANES * element_bytes * step.window["sh"]
    rows = y.images * y.height
    rows_per_chunk = max(tallest, CHUNK_BYTES // row_bytes // tallest * tallest)
    if threads > 1:
        rows_per_chunk = min(rows_per_chunk, max(tallest, -(-rows // (4 * threads)) // tallest * tallest))
    lefts, widths = np.asarray(edges[:-1]), np.diff(edges)
    runs: list[tuple[int, int, int]] = []
    chunk_start = [0]
    segments: list[tuple[Any, Any]] = []  # rows and left edges
    count = 0
    for first in range(0, rows, rows_per_chunk):
        for height, width, row, left in _runs_of_chunk(first, min(rows, first + rows_per_chunk), tallest, lefts, widths):
            tiles = row.shape[0] * left.shape[1]
            segments.append((row, left))
            runs.append((_kernel_index(height, width, stride), count, tiles))
            count += tiles * height
        chunk_start.append(len(runs))
    broadcast = [np.broadcast_arrays(row, left) for row, left in segments]
    row_of, left_of = (np.concatenate([pair[i].reshape(-1) for pair in broadcast]) for i in range(2))
    starts = {
        name: (row_start[row_of] + left_of * pixel).astype(np.int32)
        for name, (row_start, pixel) in _row_starts(step, x, y, z).items()
    }
    return Tiling(np.asarray(runs, np.int32), np.asarray(chunk_start, np.int32), starts)


def _runs_of_chunk(first: int, last: int, tallest: int, lefts: Any, widths: Any) -> Iterator[tuple[int, int, Any, Any]]:
    """Runs of equal tiles as (height, width, rows, left edges). They go through bands of rows from left to right, so that
    tiles which follow each other are neighbours in memory."""
    equal = bool((widths == widths[0]).all())
    while first < last:
        height = max(t for t in HEIGHTS if t <= min(tallest, last - first))
        bands = (last - first) // height if equal else 1
        row = np.arange(first, first + bands * height).reshape(bands, 1, height)
        for width in widths[:1] if equal else np.unique(widths):
            yield height, int(width), row, lefts[widths == width][None, :, None]
        first += bands * height


def _kernel_index(height: int, width: int, stride: int) -> int:
    """The number of a kernel, as in conv.c. Tiles of one pixel serve all other strides."""
    step = stride if stride <= 2 else 1
    return ((step - 1) * 4 + height.bit_length() - 1) * 32 + width


def _row_starts(step: Step, x: Value, y: Value, z: Value | None) -> dict[str, tuple[Any, int]]:
    """For every tensor, the position of the first pixel of every output row, and the distance of neighbouring pixels."""
    k = step.window
    image, row = np.divmod(np.arange(y.images * y.height, dtype=np.int64), y.height)
    starts = {
        "x_start": (image * x.image + (row * k["sh"] - k["ph"]) * x.row - k["pw"] * LANES, k["sw"] * LANES),
        "y_start": (image * y.image + row * y.row, LANES),
    }
    if step.addition != "none":
        assert z is not None
        starts["z_start"] = (image * z.image + row * z.row, LANES)
    return starts


def parts_of_groups(chunks: int, entries: Entries, threads: int) -> int:
    """The number of parts that the groups of output channels are divided into, so that all threads have work until the end."""
    if threads == 1:
        return 1
    return min(entries.groups, max(1, -(-6 * threads // chunks)))
