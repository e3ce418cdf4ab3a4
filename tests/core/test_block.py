import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import reference
from smartprune.core.block import Axis, Block, Grid
from smartprune.errors import SmartpruneError

Case = tuple[tuple[int, ...], tuple[int | None, ...], int, bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shapes of linear layers and convolutions, smaller and larger blocks, groups and swapped axes."""
    axes = draw(st.integers(2, 5))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    longest = (7, 6, 3, 2, 2)
    shape = [draw(st.integers(1, longest[i])) for i in range(axes)]
    shape[0] *= groups
    size = st.one_of(st.none(), st.integers(1, 8))
    sizes = tuple(draw(size) for _ in range(draw(st.integers(2, axes))))
    return tuple(shape), sizes, groups, draw(st.booleans())


def cut(case: Case) -> tuple[Grid, dict[tuple[int, ...], int]]:
    shape, sizes, groups, transposed = case
    return Block(*sizes).grid(shape, groups, transposed), reference.block_index(shape, sizes, groups, transposed)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_grid_agrees_with_slow_loops(case: Case) -> None:
    grid, index = cut(case)
    shape, sizes, groups, transposed = case
    assert grid.weight_shape == shape
    assert grid.shape == reference.grid_shape(shape, sizes, groups, transposed)
    assert grid.n == len(set(index.values())) == max(index.values()) + 1
    assert grid.sizes().tolist() == reference.block_counts(index)
    assert int(grid.sizes().sum()) == math.prod(shape)
    assert grid.ragged == (len(set(reference.block_counts(index))) > 1)
    weight = torch.randint(-9, 10, shape).double()
    assert grid.sum(weight).tolist() == reference.block_sums(weight.flatten().tolist(), index)
    mask = torch.rand(grid.n, dtype=torch.float64)
    assert grid.expand(mask).flatten().tolist() == reference.expand(mask.tolist(), index)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_mean_of_expand_is_the_mask(case: Case) -> None:
    grid, _ = cut(case)
    mask = torch.randint(0, 1000, (grid.n,)).double()
    assert torch.equal(grid.mean(grid.expand(mask)), mask)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_mean_of_block_indices_is_the_index(case: Case) -> None:
    grid, index = cut(case)
    weight = torch.tensor(list(index.values()), dtype=torch.float64).reshape(grid.weight_shape)
    assert torch.equal(grid.mean(weight), torch.arange(grid.n, dtype=torch.float64))
    assert torch.equal(grid.expand(torch.arange(grid.n, dtype=torch.float64)), weight)


def test_mean_of_expand_for_every_remainder_on_every_axis() -> None:
    """A 4x3x2x2 block, and every remainder on all four axes together."""
    block = Block(4, 3, 2, 2)
    for extra in itertools.product(range(4), range(3), range(2), range(2)):
        for base, (groups, transposed) in itertools.product((0, 1), ((1, False), (1, True), (2, False), (2, True))):
            steps = (3, 4, 2, 2) if transposed else (4, 3, 2, 2)
            order = (extra[1], extra[0], *extra[2:]) if transposed else extra
            shape = [max(1, base * step + rest) for step, rest in zip(steps, order, strict=True)]
            shape[0] *= groups
            grid = block.grid(shape, groups, transposed)
            mask = torch.arange(grid.n, dtype=torch.float64)
            assert torch.equal(grid.mean(grid.expand(mask)), mask)
            assert int(grid.sizes().sum()) == math.prod(shape)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_expand_tail_is_expand_with_the_first_axis_in_blocks(case: Case) -> None:
    grid, _ = cut(case)
    mask = torch.arange(grid.n)
    rows = torch.tensor(grid.axes[0].index())
    assert torch.equal(grid.expand_tail(mask, 1)[rows], grid.expand(mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    grid = Block(2, 2).grid((3, 3))
    assert grid.sum(torch.ones(3, 3, dtype=dtype)).dtype == dtype
    assert grid.mean(torch.ones(3, 3, dtype=dtype)).tolist() == [1, 1, 1, 1]
    assert grid.expand(torch.ones(4, dtype=dtype)).dtype == dtype


def test_channels_last_weights_have_the_same_sums() -> None:
    weight = torch.randn(5, 6, 3, 3)
    grid = Block(2, 4).grid(weight.shape)
    assert torch.equal(grid.sum(weight.to(memory_format=torch.channels_last)), grid.sum(weight))


def test_gradients_reach_mask_and_weight() -> None:
    grid = Block(2, 3).grid((5, 4, 2))
    mask = torch.rand(grid.n, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(grid.expand, mask)
    assert torch.autograd.gradcheck(grid.sum, weight)


def test_axis_with_two_parts() -> None:
    axis = Axis(parts=2, length=5, step=2)
    assert (axis.size, axis.per_part, axis.count) == (10, 3, 6)
    assert axis.lengths() == [2, 2, 1, 2, 2, 1]
    assert axis.index() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]


def test_equal_notations_of_a_block() -> None:
    assert Block(16, 8) == Block.of("16x8") == Block.of((16, 8)) == Block.of([16, 8, 1, 1]) == Block.of("16X8x1x1")
    assert Block.of("channel") == Block(1, None, None) == Block.of("1x*x*x*") == Block.of("1xNonexNone")
    assert Block.of(Block(4, 4)) == Block(4, 4)
    assert str(Block(16, 8)) == "16x8x1x1"
    assert str(Block.of("channel")) == "1x*x*x*"
    assert hash(Block(16, 8)) == hash(Block(16, 8, 1, 1))
    assert pickle.loads(pickle.dumps(Block(3, None))) == copy.deepcopy(Block(3, None)) == Block(3, None)


@given(st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=2, max_size=6))
def test_text_of_a_block_reads_back(sizes: list[int | None]) -> None:
    assert Block.of(str(Block(*sizes))) == Block(*sizes)


def test_none_takes_a_whole_axis() -> None:
    assert Block.of("channel").grid((6, 4, 3, 3)).shape == (6, 1, 1, 1)
    assert Block(None, 1).grid((6, 4)).shape == (1, 4)
    assert Block.of("channel").grid((6, 4, 3, 3), transposed=True).shape == (1, 4, 1, 1)  # its output channels
    assert Block.of("channel").grid((6, 4, 3, 3), groups=2, transposed=True).shape == (2, 4, 1, 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((16,), "at least two sizes"),
        ((0, 8), "positive int or None"),
        ((-1, 8), "positive int"),
        ((True, 8), "positive int"),
        ((1.0, 8), "positive int"),
        ("16*8", "cannot be read"),
        ("", "cannot be read"),
        ("16xx8", "cannot be read"),
        (
            nn.Linear(2, 2),
            r"^block=<Linear> has the type Linear; write a tuple such as \(16, 8\), and give other arguments.*by name$",
        ),
        (16, r"has the type int; write a tuple such as \(16, 8\)"),
    ],
)
def test_invalid_blocks_raise(value: object, words: str) -> None:
    with pytest.raises(SmartpruneError, match=words):
        Block.of(value)  # type: ignore[arg-type]


def test_block_with_more_axes_than_the_weight_raises_unless_they_are_1() -> None:
    assert Block(16, 8, 1, 1).grid((20, 20)).shape == (2, 3)
    assert Block(2, 2, None, None).grid((4, 4)).shape == (2, 2)
    with pytest.raises(SmartpruneError, match=r"block 2x2x3x3 has kernel sizes, which a weight of 2 axes cannot take"):
        Block(2, 2, 3, 3).grid((4, 4))
    with pytest.raises(SmartpruneError, match=r"block 1x1x1x2x3 has kernel sizes, which a weight of 4 axes cannot take"):
        Block(1, 1, 1, 2, 3).grid((4, 4, 3, 3))


def test_wrong_shapes_raise() -> None:
    grid = Block(2, 2).grid((4, 4))
    with pytest.raises(SmartpruneError, match=r"a tensor of shape \(4, 5\) was given for a grid of \(4, 4\)"):
        grid.sum(torch.zeros(4, 5))
    with pytest.raises(SmartpruneError, match="a mask of 3 entries was given for a grid of 4 blocks"):
        grid.expand(torch.zeros(3))
    with pytest.raises(SmartpruneError, match="cannot be divided into 3 groups"):
        Block(2, 2).grid((4, 4), groups=3)
