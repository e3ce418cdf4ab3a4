"""How a weight is cut into entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import smartprune as sp
from smartprune.runtime.cpu.entries import cut


def test_entries_have_the_order_of_a_packed_file() -> None:
    """Sorted by group of output channels, kernel position and input channels; the output channel fastest."""
    weight = np.zeros((40, 23, 2, 2), np.float32)
    kept = {(1, 0, 1, 8), (0, 1, 0, 16), (0, 0, 1, 0), (0, 0, 1, 8), (2, 1, 1, 0)}  # group, row, column, first channel
    rng = np.random.default_rng(0)
    for group, row, column, channel in kept:
        part = weight[16 * group : 16 * group + 16, channel : channel + 8, row, column]
        part[:] = rng.normal(size=part.shape)
    entries = cut(weight, (16,))
    assert (entries.lanes, entries.inner) == (16, 8)
    assert entries.start.tolist() == [0, 3, 4, 5]
    order = sorted(kept)
    assert list(zip(entries.row.tolist(), entries.column.tolist(), entries.channel.tolist(), strict=True)) == [k[1:] for k in order]
    for values, (group, row, column, channel) in zip(entries.values, order, strict=True):
        part = weight[16 * group : 16 * group + 16, channel : channel + 8, row, column]
        assert values.shape == (8, 16)
        assert (values[: part.shape[1], : part.shape[0]] == part.T).all()
        assert not values[part.shape[1] :].any()
        assert not values[:, part.shape[0] :].any()
    assert cut(np.zeros_like(weight), (16, 8)).count == 0


@pytest.mark.parametrize(
    ("block", "lanes", "inner"), [((16, 8), 16, 8), ((8, 8), 8, 8), ((16, 16), 16, 8), ((16, 4), 16, 4), ((8, 1), 8, 1)]
)
def test_the_shape_of_entries_follows_the_block(block: tuple[int, int], lanes: int, inner: int) -> None:
    grid = sp.Block(*block).grid((128, 128, 3, 3))
    weight = torch.randn(128, 128, 3, 3) * grid.expand((torch.rand(grid.n) > 0.9).float())
    entries = cut(weight.numpy(), (16, 8))
    assert (entries.lanes, entries.inner) == (lanes, inner)
    assert entries.count * lanes * inner == int((weight != 0).sum())
