"""Work lists of the fused multiply: every element and every block belongs to exactly one program."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import masked_products
from helpers.masked_products import random_layers
from smartprune.pruning import multiply_tables
from smartprune.pruning.multiply import BlockMultiplier, Rows
from smartprune.pruning.multiply_tables import FIELDS, PITCH, Place, Work


def work_of(multiplier: BlockMultiplier, channels_last: bool) -> tuple[Work, list[Place]]:
    weights = masked_products.weights_of(multiplier, channels_last=channels_last)
    places = [
        Place(grid, Rows.order_of(weight), start)
        for grid, weight, start in zip(multiplier.grids, weights, multiplier.starts[:-1], strict=True)
    ]
    return Work(places, torch.device("cpu")), places


@given(random_layers(), st.sampled_from([(1, 16), (2, 64), (8, 4096)]))
@settings(max_examples=100, deadline=None)
def test_programs_cover_everything_once(
    case: tuple[tuple[int | None, ...], list[masked_products.Shape], bool], tile: tuple[int, int]
) -> None:
    block, shapes, channels_last = case
    multiplier = masked_products.multiplier(block, shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiply_tables, "ROWS", tile[0])
        patch.setattr(multiply_tables, "TILE", tile[1])
        work, places = work_of(multiplier, channels_last)
    index = work.index.tolist()
    owner = [torch.full((math.prod(shape),), -1) for shape, _, _ in shapes]  # in memory order: the program of an element
    held = [torch.full((math.prod(shape),), -1) for shape, _, _ in shapes]  # the block that program says it is in
    summed: list[int] = []
    scratch: list[int] = []
    assert work.table.shape == (work.count, FIELDS)
    for program, line in enumerate(work.table.tolist()):
        number, row, rows, begin, end, width, base, columns, starts, blocks, slots, offset, space, even = line
        assert offset * PITCH == work.offsets[number]
        assert not even or begin % 8 == end % 8 == width % 8 == 0
        scratch += range(space, space + end - begin)
        members: list[int] = []
        for slot in range(slots):
            inside = index[index[starts + slot] : index[starts + slot + 1]] if slots else []
            members += inside
            summed.append(base + index[blocks + slot])
            assert all(index[columns + column] == index[blocks + slot] for column in inside)
        assert sorted(members) == list(range(begin, end))
        for r in range(row, row + rows):
            assert (owner[number][r * width + begin : r * width + end] == -1).all()
            owner[number][r * width + begin : r * width + end] = program
            held[number][r * width + begin : r * width + end] = base + torch.tensor(index[columns + begin : columns + end])
    assert sorted(summed) == list(range(multiplier.starts[-1]))
    assert sorted(scratch) == list(range(work.space))
    for place, one, blocks_of in zip(places, owner, held, strict=True):
        assert (one >= 0).all()
        expected = place.grid.expand(torch.arange(place.start, place.start + place.grid.n))
        assert torch.equal(blocks_of, expected.permute(place.order).reshape(-1))


def test_flat_outputs_do_not_overlap() -> None:
    multiplier = masked_products.multiplier((4, 4))
    work, places = work_of(multiplier, channels_last=False)
    ends = [o + math.prod(p.grid.weight_shape) for o, p in zip(work.offsets, places, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*work.offsets[1:], work.size], strict=True))
    assert all(offset % PITCH == 0 for offset in work.offsets)


def test_stretches_have_even_sizes() -> None:
    multiplier = masked_products.multiplier((16, 8), [((32, 64, 3, 3), 1, False)])
    work, _ = work_of(multiplier, channels_last=False)
    widths = (work.table[:, 4] - work.table[:, 3]).unique().tolist()
    assert widths == [288]  # 576 columns in blocks of 72: two halves, not 504 and 72
    assert work.table[:, 13].all()  # all of it in wide accesses
