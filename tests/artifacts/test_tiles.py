"""Tiles against slow loops over the channels of every block."""

from __future__ import annotations

import itertools

import pytest
import torch

from smartprune.artifacts.tiles import from_tiles, tile_shape, to_tiles
from smartprune.core.block import Block

CASES = [  # shape, block, groups, transposed
    ((8, 12), (4, 4), 1, False),
    ((7, 10), (4, 3), 1, False),
    ((12, 5, 3, 3), (4, 2), 2, False),
    ((12, 5, 3, 3), (4, 2, 3, 3), 3, False),
    ((6, 4, 3, 3), (4, 3), 2, True),
    ((5, 6, 4), (None, 4), 1, False),
]


@pytest.mark.parametrize(("shape", "size", "groups", "transposed"), CASES, ids=str)
def test_every_weight_lies_in_the_tile_of_its_block(
    shape: tuple[int, ...], size: tuple[int | None, ...], groups: int, transposed: bool
) -> None:
    grid = Block.of(size).grid(shape, groups, transposed)
    weight = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int64).reshape(shape)
    tiles = to_tiles(weight, grid, transposed)
    assert tuple(tiles.shape) == tile_shape(grid, transposed)
    blocks = [set(tile.flatten().tolist()) - {0} for row in tiles for tile in row]
    assert sum(map(len, blocks)) == weight.numel()  # every number once; the rest is padding
    first, second, *kernel = grid.axes
    per_group = first.length
    block_of: dict[tuple[int, ...], set[int]] = {}
    for place in itertools.product(*map(range, shape)):
        group, channel = divmod(place[0], per_group)
        key = (group, channel // first.step, place[1] // second.step)
        key += tuple(at // axis.step for at, axis in zip(place[2:], kernel, strict=True))
        block_of.setdefault(key, set()).add(int(weight[place]))
    assert sorted(map(sorted, block_of.values())) == sorted(sorted(block) for block in blocks if block)


@pytest.mark.parametrize(("shape", "size", "groups", "transposed"), CASES, ids=str)
def test_tiles_are_turned_back_into_the_same_bits(
    shape: tuple[int, ...], size: tuple[int | None, ...], groups: int, transposed: bool
) -> None:
    grid = Block.of(size).grid(shape, groups, transposed)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(from_tiles(to_tiles(weight, grid, transposed), grid, transposed), weight)
