"""Blocks: how a weight is divided into boxes. This module alone handles partial blocks, groups and swapped axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .. import text
from ..errors import SmartpruneError


@dataclass(frozen=True, init=False, repr=False)
class Block:
    """The size of a block: an axis-aligned box of a weight.

    Args:
        sizes: Output channels, input channels, then the kernel. ``None`` takes a whole axis. Missing kernel sizes repeat the last
            given kernel size, or are 1 if there is none.

    Raises:
        SmartpruneError: There are fewer than two sizes, or one is not a positive integer or None.

    Examples:
        >>> import smartprune as sp
        >>> sp.Block(16, 8) == sp.Block.of("16x8") == sp.Block.of((16, 8, 1, 1))
        True
        >>> sp.Block.of("channel")  # a whole output channel
        Block(1, None, None)
        >>> sp.Block(2, 2).grid((4, 6)).shape
        (2, 3)
    """

    sizes: tuple[int | None, ...]

    def __init__(self, *sizes: int | None) -> None:
        sizes = tuple(int(size) if isinstance(size, np.integer) else size for size in sizes)
        valid = all(size is None or (type(size) is int and size > 0) for size in sizes)
        if not valid or len(sizes) < 2:
            raise SmartpruneError(
                f"block {sizes} must have at least two sizes (output channels, input channels, then the kernel), each "
                "a positive int or None for the whole axis; write (16, 8) for 16 output x 8 input channels"
            )
        kernel = sizes[2:]
        if len(set(kernel)) == 1:  # so that (16, 8, 1, 1) equals (16, 8), and (1, None, None) equals its longer forms
            sizes = sizes[:2] if kernel[0] == 1 else sizes[:3]
        object.__setattr__(self, "sizes", sizes)

    @staticmethod
    def of(value: Block | str | Sequence[int | None]) -> Block:
        """Reads a block from a tuple or a text.

        Args:
            value: A block, ``(16, 8)``, ``"16x8"``, ``"16x8x1x1"``, ``"1x*x*x*"`` or ``"channel"``.

        Returns:
            The block.

        Raises:
            SmartpruneError: The value cannot be read.
        """
        if isinstance(value, Block):
            return value
        if isinstance(value, str):
            if value == "channel":
                return Block(1, None, None)
            try:
                return Block(*(None if part in ("none", "*") else int(part) for part in value.lower().split("x")))
            except ValueError:
                raise SmartpruneError(
                    f"block={value!r} cannot be read; write sizes joined by 'x' such as '16x8' or '16x8x1x1' "
                    "('*' takes a whole axis), or 'channel'"
                ) from None
        if isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1):
            return Block(*value)
        raise SmartpruneError(
            f"block={text.show(value)} has the type {type(value).__name__}; write a tuple such as (16, 8), and give other "
            "arguments, such as receipt= and example=, by name"
        )

    def __repr__(self) -> str:
        return f"Block({', '.join(map(str, self.sizes))})"

    def __str__(self) -> str:
        """The text that :meth:`of` reads, such as ``16x8x1x1``."""
        return "x".join("*" if size is None else str(size) for size in self.fit(max(4, len(self.sizes))))

    def fit(self, axes: int) -> tuple[int | None, ...]:
        """One size per axis of a weight, in the order (out, in, *kernel).

        Args:
            axes: The number of axes of the weight.

        Returns:
            The sizes; None stands for the whole axis.

        Raises:
            SmartpruneError: The block has more kernel sizes than the weight has axes.
        """
        sizes = self.sizes
        fill = sizes[-1] if len(sizes) > 2 else 1
        if any(size not in (1, None) for size in sizes[axes:]):
            raise SmartpruneError(f"block {self} has kernel sizes, which a weight of {axes} axes cannot take; make them 1 or None")
        return (sizes + (fill,) * (axes - len(sizes)))[:axes]

    def grid(self, shape: Sequence[int], groups: int = 1, transposed: bool = False) -> Grid:
        """The grid of blocks of a weight.

        Args:
            shape: The shape of the weight, as PyTorch stores it.
            groups: The number of groups. They divide the first stored axis, and no block crosses from one to the next.
            transposed: Whether the weight is stored as (in, out / groups, *kernel), as in a transposed convolution.

        Returns:
            The grid. Its last block along an axis may be smaller.

        Raises:
            SmartpruneError: The groups do not divide the first axis, or the block has too many sizes.
        """
        sizes = list(self.fit(len(shape)))
        if transposed:
            sizes[0], sizes[1] = sizes[1], sizes[0]
        if groups < 1 or shape[0] % groups:
            raise SmartpruneError(f"a weight of shape {tuple(shape)} cannot be divided into {groups} groups")
        axes = []
        for i, (length, size) in enumerate(zip(shape, sizes, strict=True)):
            parts = groups if i == 0 else 1
            part = length // parts
            axes.append(Axis(parts, part, part if size is None else min(size, part)))
        return Grid(tuple(axes))


@dataclass(frozen=True)
class Axis:
    """One axis of a weight: ``parts`` segments of ``length`` entries, each divided into steps of ``step`` entries.

    The last step of a segment may be shorter.
    """

    parts: int
    length: int
    step: int

    @property
    def size(self) -> int:
        return self.parts * self.length

    @property
    def per_part(self) -> int:
        return -(-self.length // self.step)

    @property
    def count(self) -> int:
        return self.parts * self.per_part

    def index(self) -> list[int]:
        """The step of every entry along the axis."""
        return [p * self.per_part + i // self.step for p in range(self.parts) for i in range(self.length)]

    def lengths(self) -> list[int]:
        """The number of entries in every step."""
        full, rest = divmod(self.length, self.step)
        return ([self.step] * full + ([rest] if rest else [])) * self.parts


@dataclass(frozen=True)
class Grid:
    """The blocks of one weight. ``shape`` counts them per axis; the flat order is row-major over ``shape``.

    >>> w = torch.arange(12.).reshape(3, 4)
    >>> grid = Block(2, 2).grid((3, 4))
    >>> grid.shape, grid.n, grid.sizes().tolist()
    ((2, 2), 4, [4, 4, 2, 2])
    >>> grid.sum(w).tolist()
    [10.0, 18.0, 17.0, 21.0]
    >>> grid.expand(torch.tensor([1., 0., 0., 1.])).tolist()
    [[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """

    axes: tuple[Axis, ...]

    @cached_property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.count for axis in self.axes)

    @cached_property
    def n(self) -> int:
        return math.prod(self.shape)

    @property
    def ragged(self) -> bool:
        return any(axis.length % axis.step for axis in self.axes)

    def sizes(self) -> Tensor:
        """The number of elements of each block, without padding, int64 [n]."""
        out = torch.ones((), dtype=torch.int64, device="cpu")
        for axis in self.axes:
            out = out[..., None] * torch.tensor(axis.lengths(), device="cpu")
        return out.reshape(-1)

    def sum(self, weight: Tensor) -> Tensor:
        """Sum of a weight-shaped tensor over each block, [n]."""
        self._check(weight)
        out = weight
        for i in range(len(self.axes) - 1, -1, -1):
            axis = self.axes[i]
            if axis.step == 1:
                continue
            out = out.unflatten(i, (axis.parts, axis.length))
            short = axis.per_part * axis.step - axis.length
            if short:
                out = torch.cat([out, out.new_zeros(*out.shape[: i + 1], short, *out.shape[i + 2 :])], dim=i + 1)
            out = out.unflatten(i + 1, (axis.per_part, axis.step)).sum(i + 2).flatten(i, i + 1)
        return out.reshape(-1)

    def mean(self, weight: Tensor) -> Tensor:
        """Mean over the elements of each block, without padding, [n]. Partial blocks are comparable with full ones."""
        return self.sum(weight) / self.sizes().to(weight.device, weight.dtype)

    def expand(self, mask: Tensor) -> Tensor:
        """Spreads a value per block, [n], over the shape of the weight."""
        return self.expand_tail(mask, first=0)

    def expand_tail(self, mask: Tensor, first: int = 1) -> Tensor:
        """Spreads a value per block, [n], along the axes from ``first`` on. Earlier axes keep one entry per block."""
        if mask.numel() != self.n:
            raise SmartpruneError(f"a mask of {mask.numel()} entries was given for a grid of {self.n} blocks")
        out = mask.reshape(self.shape)
        for i in range(first, len(self.axes)):
            out = spread(out, i, self.axes[i])
        return out

    def _check(self, weight: Tensor) -> None:
        if tuple(weight.shape) != self.weight_shape:
            raise SmartpruneError(f"a tensor of shape {tuple(weight.shape)} was given for a grid of {self.weight_shape}")


def spread(values: Tensor, dim: int, axis: Axis) -> Tensor:
    """Repeats the value of each step over the entries of that step, along ``dim``."""
    if axis.step == 1:
        return values
    out = values.unsqueeze(dim + 1).expand(*values.shape[: dim + 1], axis.step, *values.shape[dim + 1 :])
    out = out.flatten(dim, dim + 1)
    if axis.length % axis.step == 0:
        return out
    cropped: Tensor = out.unflatten(dim, (axis.parts, axis.per_part * axis.step)).narrow(dim + 1, 0, axis.length)
    return cropped.flatten(dim, dim + 1)


@dataclass(frozen=True)
class Layout:
    """How the axes of a stored weight are read: (out, in / groups, *kernel), or (in, out / groups, *kernel) if ``transposed``.

    ``parts`` is the number of groups. They divide the first stored axis, and no block crosses from one to the next.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: int = 1
    transposed: bool = False

    def cut(self, block: Block) -> Grid:
        """The grid of the weight."""
        return block.grid(self.shape, self.parts, self.transposed)
