"""Tensors that claim to be float32 numbers on the CPU, although their numbers are not in their memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


class WithoutClass(Tensor):
    """A subclass without operations of its own: an ordinary tensor in memory."""


class Wrapped(Tensor):
    """A class with operations of its own: its numbers are in another tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        out: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args = torch.utils._pytree.tree_map_only(Wrapped, lambda x: x.inner, args)
        return func(*args, **(kwargs or {}))


def fake(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


def freed(x: Tensor, left: int = 0) -> Tensor:
    """The tensor, whose storage is shrunk to this number of bytes."""
    x.untyped_storage().resize_(left)
    return x


WITHOUT_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros of automatic differentiation": lambda x: torch._efficientzerotensor(tuple(x.shape)),
    "fake": fake,
    "functional": torch._to_functional_tensor,
    "wrapped": Wrapped,
}
FREED: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": lambda x: freed(x.clone()),
    "shrunk": lambda x: freed(x.clone(), 4 * (x.numel() - 1)),
    "shrunk behind a view": lambda x: freed(torch.cat([x, x])[len(x) :], 4 * x.numel()),
    "shrunk with other strides": lambda x: freed(x.transpose(0, -1).contiguous().transpose(0, -1), 4 * (x.numel() - 1)),
}
