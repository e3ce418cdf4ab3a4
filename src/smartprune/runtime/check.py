"""Comparing the result of an accelerated model with the model's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(eq=False)
class ResultMismatch(Exception):  # noqa: N818 - callers catch it and explain the cause
    """Two results differ by more than rounding explains."""

    error: float
    scale: float

    def __str__(self) -> str:
        return f"the result differs from the model's own by up to {self.error:g}, and the model's largest number is {self.scale:g}"


def compare(result: Any, expected: Any, tolerance: float) -> None:
    """Raises :class:`ResultMismatch` unless two results agree.

    Tensors must have the same shape and dtype, and floating-point tensors may differ by a share ``tolerance`` of their largest
    number. Tensors with infinities or NaN are not compared.
    """
    leaves, expected_leaves = tree_leaves(result), tree_leaves(expected)
    if len(leaves) != len(expected_leaves):
        raise ResultMismatch(math.inf, _largest(expected_leaves))
    for a, b in zip(leaves, expected_leaves, strict=True):
        if not isinstance(b, Tensor):
            if isinstance(b, (int, float, str, type(None))) and (type(a) is not type(b) or (a != b and b == b)):
                raise ResultMismatch(math.inf, _largest(expected_leaves))
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            raise ResultMismatch(math.inf, _largest(expected_leaves))
        if not b.is_floating_point() or not b.numel() or not b.isfinite().all():
            continue
        error, scale = float((a - b).abs().max()), float(b.abs().max())
        if not error <= tolerance * max(scale, 1e-6):
            raise ResultMismatch(error, scale)


def _largest(leaves: Sequence[Any]) -> float:
    sizes = [float(x.abs().max()) for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    return max(sizes, default=0.0)


def random_like(leaves: Sequence[Any]) -> list[Any] | None:
    """Inputs of the same shapes and similar size, with random numbers in float32 tensors. None if there are no such tensors."""
    generator = torch.Generator().manual_seed(0)  # leaves the caller's random state unchanged
    out: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.numel():
            size = float(leaf.abs().max())
            noise = torch.randn(leaf.shape, generator=generator, device="cpu")
            out.append(noise * (size / 3) if 0 < size < math.inf else noise)
        else:
            out.append(leaf.clone() if isinstance(leaf, Tensor) else leaf)
    return out if any(a is not b and a.is_floating_point() for a, b in zip(out, leaves, strict=True)) else None
