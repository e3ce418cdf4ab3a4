"""Two results of one model: how far they lie apart. And inputs at random, to compare on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class Apart(Exception):  # noqa: N818 - it is no error of anybody's
    """Two results differ by more than rounding explains."""

    error: float
    scale: float

    def __str__(self) -> str:
        return f"the result lies up to {self.error:g} from the model's own, whose largest number is {self.scale:g}"


def compare(ours: Any, theirs: Any, share: float) -> None:
    """Raises :class:`Apart` if results are not alike: tensors of one shape and dtype, and floating ones within a share of the
    largest number. Results with infinities or NaN are taken as they are."""
    first, second = tree_leaves(ours), tree_leaves(theirs)
    if len(first) != len(second):
        raise Apart(math.inf, largest(second))
    for a, b in zip(first, second, strict=True):
        if not isinstance(b, Tensor):
            if isinstance(b, (int, float, str, type(None))) and (type(a) is not type(b) or (a != b and b == b)):
                raise Apart(math.inf, largest(second))
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            raise Apart(math.inf, largest(second))
        if not b.is_floating_point() or not b.numel() or not b.isfinite().all():
            continue
        error, scale = float((a - b).abs().max()), float(b.abs().max())
        if not error <= share * max(scale, 1e-6):
            raise Apart(error, scale)


def largest(leaves: Sequence[Any]) -> float:
    found = [float(x.abs().max()) for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return max(found, default=0.0)


def at_random(leaves: Sequence[Any]) -> list[Any] | None:
    """Inputs of the same shapes and about the same size with random numbers where these are floating; None if none are."""
    generator = torch.Generator().manual_seed(0)  # of its own: the caller's random numbers are not ours to draw
    out: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.numel():
            size = float(leaf.abs().max())
            noise = torch.randn(leaf.shape, generator=generator, device="cpu")
            out.append(noise * (size / 3) if 0 < size < math.inf else noise)
        else:
            out.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
    return out if any(a is not b and a.is_floating_point() for a, b in zip(out, leaves, strict=True)) else None
