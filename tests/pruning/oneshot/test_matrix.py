"""Weights as matrices, blocks on these matrices, and the rows that convolutions read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smartprune.core.block import Block
from smartprune.core.layers import Layer
from smartprune.pruning.oneshot.matrix import Geometry, Tiles, as_matrices, as_weight, conv_rows

GRIDS: list[tuple[tuple[int, ...], int, bool, tuple[Any, ...]]] = [
    ((6, 5), 1, False, (4, 2)),
    ((6, 5), 3, False, (2, 3)),
    ((8, 3, 3, 3), 2, False, (3, 2)),
    ((8, 6, 3), 1, False, (4, 4, None)),
    ((8, 6, 3, 2), 1, False, (4, 4, 2, 1)),
    ((6, 4, 3, 3), 2, True, (3, 2)),
    ((8, 3, 3, 3), 1, False, (1, None, None)),
    ((8, 3, 3, 3), 1, False, (None, None, None)),
]


@pytest.mark.parametrize(("shape", "parts", "transposed", "block"), GRIDS)
def test_tiles_cover_the_elements_of_each_block(shape: Any, parts: int, transposed: bool, block: Any) -> None:
    layer = Layer("a", "Conv2d", Block(*block).grid(shape, parts, transposed), 0, transposed, (("a", "weight"),))
    tiles = Tiles.of(layer)
    matrices = torch.full(as_matrices(torch.zeros(shape), parts, transposed).shape, -1)
    for part in range(parts):
        for r, rows in enumerate(tiles.rows):
            for c, columns in enumerate(tiles.columns):
                matrices[part, rows[rows >= 0][:, None], columns[columns >= 0]] = tiles.index[part, r, c]
    assert torch.equal(as_weight(matrices, shape, transposed), layer.grid.expand(torch.arange(layer.n)))
    assert tiles.columns[:, 0].tolist() == sorted(tiles.columns[:, 0].tolist())


@pytest.mark.parametrize(("shape", "parts", "transposed"), [grid[:3] for grid in GRIDS])
def test_matrices_and_weights_are_inverse(shape: Any, parts: int, transposed: bool) -> None:
    weight = torch.randn(shape)
    assert torch.equal(as_weight(as_matrices(weight, parts, transposed), shape, transposed), weight)


def test_rows_are_the_unfolded_images_of_torch() -> None:
    x = torch.randn(2, 3, 7, 6)
    rows = conv_rows(x, Geometry((3, 2), (2, 1), ((1, 1), (0, 0)), (1, 2), 1, False), lambda rows: None)
    unfolded = torch.nn.functional.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1))
    assert torch.equal(rows[0], unfolded.transpose(1, 2).reshape(-1, 18))


def test_picked_rows_are_those_of_all_rows() -> None:
    geometry = Geometry((3,), (2,), ((1, 0),), (1,), 2, True)
    x, chosen = torch.randn(3, 4, 5), torch.tensor([0, 7, 11])
    every = conv_rows(x, geometry, lambda rows: None)
    assert torch.equal(conv_rows(x, geometry, lambda rows: chosen), every[:, chosen])
