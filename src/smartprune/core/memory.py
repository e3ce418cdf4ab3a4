"""Which tensors have their numbers in memory. Kernels take addresses, and do not check what is stored there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import mul

import torch
from torch import Tensor

from ..errors import SmartpruneError

_NO_DISPATCH = Tensor.__torch_dispatch__


class NoMemoryError(SmartpruneError):
    """A tensor has no memory that holds its numbers."""

    def __init__(self, tensor: Tensor, where: str) -> None:
        kind = type(tensor).__name__
        super().__init__(
            f"{where}: a {kind} of shape {tuple(tensor.shape)} has no memory that kernels can read; pass ordinary tensors"
        )


def address_of(tensor: Tensor, where: str) -> int:
    """The address of the first number of a tensor, or 0 if it has no numbers.

    Raises :class:`NoMemoryError` for fake, functional and batched tensors, for the zero tensors of autograd, and for classes
    with operations of their own: they have no memory, or store something else there. Raises an error that starts with ``where``
    if the memory was freed.

    >>> import torch
    >>> address_of(torch.zeros(3), "example") == 0
    False
    """
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        raise NoMemoryError(tensor, where)
    try:
        address = tensor.data_ptr()
        storage = tensor.untyped_storage().nbytes()
    except RuntimeError:  # torch: "Cannot access data pointer of Tensor that doesn't have storage", also for sparse tensors
        raise NoMemoryError(tensor, where) from None
    count = tensor.numel()
    if count == 0:
        return 0
    if not tensor.is_contiguous():
        count = _span(tensor)
    if storage < (tensor.storage_offset() + count) * tensor.element_size():
        raise SmartpruneError(
            f"{where}: a tensor of shape {tuple(tensor.shape)} has only {storage:,} bytes of memory left; it must have memory for "
            "all its numbers; untyped_storage().resize_() or a sharding wrapper may have freed it: restore its memory first"
        )
    if not address:
        raise NoMemoryError(tensor, where)
    return address


def overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors, by their positions, that have numbers in the same place in memory. A tensor is paired with itself if
    several of its numbers lie in one place. Tensors without memory are left out.

    >>> import torch
    >>> a = torch.zeros(4, 4)
    >>> list(overlaps([a[:2], a[1:], torch.zeros(3).expand(2, 3), a[3:, :2]]))
    [(0, 1), (1, 3), (2, 2)]
    """
    spans: dict[int, list[tuple[int, int, int]]] = {}  # by the address of the storage: start and end in bytes, and the position
    pairs: list[tuple[int, int]] = []
    for i, tensor in enumerate(tensors):
        try:
            if tensor.layout is not torch.strided or not address_of(tensor, ""):
                continue
        except SmartpruneError:
            continue
        start, count = int(tensor.storage_offset()), _span(tensor)
        if count < tensor.numel():
            pairs.append((i, i))
        size = tensor.element_size()
        spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start * size, (start + count) * size, i))
    for shared in spans.values():
        shared.sort()
        for n, (_, end, i) in enumerate(shared):
            for start, _, j in shared[n + 1 :]:
                if start >= end:
                    break
                if _have_common_numbers(tensors[i], tensors[j]):
                    pairs.append((min(i, j), max(i, j)))
    yield from sorted(pairs)


def _have_common_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage have common elements. Views may be interleaved without having any."""
    if a.element_size() != b.element_size():
        return True
    first = min(a.storage_offset(), b.storage_offset())
    taken = torch.zeros(max(t.storage_offset() + _span(t) for t in (a, b)) - first, dtype=torch.bool, device="cpu")
    taken.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())


def _span(tensor: Tensor) -> int:
    """How many elements of its storage a tensor that is not empty spans."""
    return int(1 + sum(map(mul, tensor.shape, tensor.stride())) - sum(tensor.stride()))


def check_memory(tensor: Tensor, where: str) -> None:
    """Raises an error that starts with ``where`` if the memory of a tensor was freed: torch reads it without a check."""
    with suppress(NoMemoryError):
        address_of(tensor, where)
