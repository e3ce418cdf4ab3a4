"""The tables of a gather, compared with the memory that they describe."""

from __future__ import annotations

import numpy as np
import pytest

from smartprune.runtime.cpu.arena import Value, dimensions
from smartprune.runtime.cpu.entries import LANES
from smartprune.runtime.cpu.gather import positions


def value(shape: tuple[int, ...], rows: bool = False) -> Value:
    out = Value(*dimensions(shape, rows), rows=rows)
    out.margin = [1, 2, 0, 1]
    return out


def stored(array: np.ndarray, x: Value) -> np.ndarray:
    """The memory of a tensor from its first pixel on, pixel by pixel."""
    whole = array.reshape(-1, x.channels).T[None, :, None, :] if x.rows else array.reshape(x.images, x.channels, x.height, x.width)
    out = np.full(x.images * x.image, -7, array.dtype)
    for n, c, h, w in np.ndindex(*whole.shape):
        out[n * x.image + c // LANES * x.plane + c % LANES + h * x.row + w * LANES] = whole[n, c, h, w]
    return out


def read(memory: np.ndarray, tables: list[np.ndarray], y: Value) -> np.ndarray:
    """The result of a gather, [images, channels, rows, columns], zero where it reads nothing."""
    if len(tables) == 1:
        at = tables[0].transpose(0, 1, 4, 2, 3).reshape(y.images, -1, y.height, y.width)[:, : y.channels]
        return np.where(at < 0, 0, memory[at])
    grids = np.meshgrid(
        *(table[:size] for table, size in zip(tables, (y.images, y.channels, y.height, y.width), strict=True)), indexing="ij"
    )
    return np.where(np.min(grids, axis=0) < 0, 0, memory[np.maximum(sum(grids), 0)])


@pytest.mark.parametrize("case", ["flatten", "permute", "flip", "pad", "uneven", "rows", "to rows"])
def test_tables_point_at_the_numbers(case: str) -> None:
    from_rows, to_rows = case == "rows", case == "to rows"
    shape = (2, 5, 20) if from_rows else (2, 21, 4, 5)
    numbers = np.arange(1, np.prod(shape) + 1).reshape(shape)
    moved = {
        "flatten": lambda a: a.reshape(2, -1),
        "permute": lambda a: a.transpose(0, 2, 3, 1),
        "flip": lambda a: a[:, ::-1, ::-1],
        "pad": lambda a: np.pad(a, ((0, 0), (0, 0), (1, 0), (2, 3))),
        "uneven": lambda a: a.reshape(2, 3, 7, 20).transpose(0, 1, 3, 2).reshape(6, 20, 7, 1),
        "rows": lambda a: a.transpose(0, 2, 1)[..., None],
        "to rows": lambda a: a.reshape(2, 21, 20).transpose(0, 2, 1),
    }[case](numbers)
    x, y = value(shape, from_rows), value(moved.shape, to_rows)
    tables = positions(moved - 1, x, y)
    assert len(tables) == (1 if case == "uneven" else 4)
    expected = (
        moved.reshape(-1, y.channels).T[None, :, None, :] if to_rows else moved.reshape(y.images, y.channels, y.height, y.width)
    )
    assert (read(stored(numbers, x), tables, y) == expected).all()
