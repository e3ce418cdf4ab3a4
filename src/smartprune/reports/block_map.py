"""The block map of a layer as a drawing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from ..text import escape, shorten
from .draw import Drawing
from .view import Array, LayerView

MAX_CELLS = 512  # along a side; in a larger map, several blocks share a cell
FAINTEST = 0.12  # opacity of a cell with few kept blocks


def block_map(layer: LayerView) -> Drawing:
    """A panel per kernel position, with outputs from top to bottom. A shared cell is darker the more of its blocks are kept."""
    panels = _mean_of_cells(layer.panels.astype(np.float64), -(-max(layer.panels.shape[1:]) // MAX_CELLS))
    count, rows, columns = panels.shape
    across = layer.row.grid[-1] if len(layer.row.grid) > 2 else 1
    cell = max(0.75, min(8.0, 640 / (across * columns)))
    gap = 10.0
    width, height = across * (columns * cell + gap) - gap + 20, -(-count // across) * (rows * cell + gap) - gap + 44
    name = escape(layer.row.name)
    drawing = Drawing(max(width, 240), height, f"Blocks of {shorten(name, 60)}: dark is kept")
    title = f"{shorten(name, 40)}: {layer.row.blocks.kept:,} of {layer.row.blocks.total:,} kept"
    drawing.text("ink", 10, 20, title, size=12)
    for number, panel in enumerate(panels):
        x0, y0 = 10 + (number % across) * (columns * cell + gap), 32 + (number // across) * (rows * cell + gap)
        drawing.box("band", x0, y0, x0 + columns * cell, y0 + rows * cell)
        for r, line in enumerate(panel):
            for start, stop, share in _runs(line):
                drawing.box("accent", x0 + start * cell, y0 + r * cell, x0 + stop * cell, y0 + (r + 1) * cell, round(share, 2))
    return drawing


def _mean_of_cells(panels: Array, side: int) -> Array:
    """The mean over squares of ``side`` by ``side`` blocks, which are smaller at the edges."""
    if side <= 1:
        return panels
    _, rows, columns = panels.shape
    starts = [np.arange(0, size, side) for size in (rows, columns)]
    sums = np.add.reduceat(np.add.reduceat(panels, starts[0], axis=1), starts[1], axis=2)
    sizes = [np.minimum(side, size - start) for size, start in zip((rows, columns), starts, strict=True)]
    means: Array = sums / (sizes[0][:, None] * sizes[1][None, :])
    return means


def _runs(line: Array) -> Iterable[tuple[int, int, float]]:
    """Start, end and value of every run of equal values above zero."""
    ends = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
    for start, stop in pairwise(ends):
        if line[start] > 0:
            yield start, stop, max(float(line[start]), FAINTEST)
