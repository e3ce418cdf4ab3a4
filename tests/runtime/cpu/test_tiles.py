"""The tiles of a convolution cover every output pixel exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import fx

from smartprune.runtime.cpu.arena import Value
from smartprune.runtime.cpu.entries import LANES
from smartprune.runtime.cpu.tiles import Tiling, tile
from smartprune.runtime.lower.steps import Step


def convolution(stride: int, padding: int) -> Step:
    node = fx.symbolic_trace(torch.nn.Identity()).graph.find_nodes(op="placeholder")[0]
    window = dict.fromkeys(("kh", "kw"), 3) | dict.fromkeys(("sh", "sw"), stride)
    return Step("conv", node, [node], window=window | dict.fromkeys(("ph", "pw"), padding) | dict.fromkeys(("dh", "dw"), 1))


def tiling(images: int, side: int, stride: int, threads: int) -> tuple[Tiling, Value]:
    x = Value(images, 24, side, side + 3, margin=[1, 1, 1, 1])
    y = Value(images, 40, (side - 1) // stride + 1, (side + 2) // stride + 1)
    return tile(convolution(stride, 1), x, y, None, 4, 12, threads), y


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("images", "side"), [(1, 1), (1, 7), (2, 13), (3, 40)])
def test_every_pixel_belongs_to_one_tile(images: int, side: int, stride: int, threads: int) -> None:
    tiles, y = tiling(images, side, stride, threads)
    covered = np.zeros(images * y.height * y.width, np.int64)
    for kernel, first, count in tiles.runs:
        height, width = 1 << (kernel // 32) % 4, kernel % 32
        for segment in range(first, first + count * height):
            start = tiles.starts["y_start"][segment]
            assert start % LANES == 0
            image, rest = divmod(int(start), y.image)
            pixel = image * y.height * y.width + rest // LANES
            covered[pixel : pixel + width] += 1
    assert (covered == 1).all()


def test_chunks_hold_all_runs_in_order() -> None:
    tiles, _ = tiling(2, 64, 1, 4)
    assert tiles.chunks > 1
    assert tiles.chunk_start[0] == 0
    assert tiles.chunk_start[-1] == len(tiles.runs)
    assert (np.diff(tiles.chunk_start) > 0).all()


def test_inputs_are_read_where_the_stride_and_the_padding_say() -> None:
    tiles, y = tiling(1, 9, 2, 1)
    x = Value(1, 24, 9, 12, margin=[1, 1, 1, 1])
    for out, into in zip(tiles.starts["y_start"], tiles.starts["x_start"], strict=True):
        row, column = divmod(int(out) // LANES, y.width)
        assert into == (2 * row - 1) * x.row + (2 * column - 1) * LANES
