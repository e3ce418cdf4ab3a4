"""Slow loops in plain Python that compute what the fast code must return. Nothing here imports the package."""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

Index = tuple[int, ...]


def stored_sizes(sizes: Sequence[int | None], axes: int, transposed: bool) -> list[int | None]:
    """A block's sizes, given for (out, in, *kernel), in the order in which a weight stores its axes."""
    out = list(sizes)
    while len(out) < axes:
        out.append(out[-1] if len(sizes) > 2 else 1)
    out = out[:axes]
    if transposed:
        out = [out[1], out[0], *out[2:]]
    return out


def elements(shape: Sequence[int]) -> Iterator[Index]:
    return itertools.product(*map(range, shape))


def block_of(index: Index, shape: Sequence[int], sizes: Sequence[int | None], groups: int, transposed: bool) -> Index:
    """The place in the grid of the block that holds one element: walks along every axis and counts the cuts."""
    place = []
    for axis, size in enumerate(stored_sizes(sizes, len(shape), transposed)):
        part = shape[axis] // groups if axis == 0 else shape[axis]
        block, filled = 0, 0
        for i in range(1, index[axis] + 1):
            filled += 1
            if i % part == 0 or filled == size:  # a new group or a full block
                block, filled = block + 1, 0
        place.append(block)
    return tuple(place)


def grid_shape(shape: Sequence[int], sizes: Sequence[int | None], groups: int, transposed: bool) -> Index:
    last = block_of(tuple(n - 1 for n in shape), shape, sizes, groups, transposed)
    return tuple(i + 1 for i in last)


def flat(place: Index, grid: Index) -> int:
    out = 0
    for i, n in zip(place, grid, strict=True):
        out = out * n + i
    return out


def block_index(shape: Sequence[int], sizes: Sequence[int | None], groups: int = 1, transposed: bool = False) -> dict[Index, int]:
    """For every element of a weight, the flat number of its block."""
    grid = grid_shape(shape, sizes, groups, transposed)
    return {index: flat(block_of(index, shape, sizes, groups, transposed), grid) for index in elements(shape)}


def block_sums(values: Sequence[float], index: dict[Index, int]) -> list[float]:
    """Sums of a weight's values, given in row-major order, over its blocks."""
    out = [0.0] * (max(index.values()) + 1)
    for value, block in zip(values, index.values(), strict=True):
        out[block] += value
    return out


def block_counts(index: dict[Index, int]) -> list[int]:
    return [int(n) for n in block_sums([1.0] * len(index), index)]


def expand(mask: Sequence[float], index: dict[Index, int]) -> list[float]:
    return [mask[block] for block in index.values()]


def occupied(values: Sequence[float], index: dict[Index, int]) -> list[bool]:
    out = [False] * (max(index.values()) + 1)
    for value, block in zip(values, index.values(), strict=True):
        if value != 0:
            out[block] = True
    return out


def keep(sparsity: str, n: int) -> int:
    """ceil((1 - sparsity) * n) from the decimal text, with no floating point."""
    whole, _, decimals = sparsity.partition(".")
    removed = Fraction(int(whole + decimals), 10 ** len(decimals))
    left = (1 - removed) * n
    return left.numerator // left.denominator + (1 if left.numerator % left.denominator else 0)


def conv_macs(out_channels: int, in_channels: int, groups: int, kernel: Sequence[int], positions: int) -> int:
    total = 0
    for _ in range(out_channels):
        for _ in range(in_channels // groups):
            total += math.prod(kernel) * positions
    return total
