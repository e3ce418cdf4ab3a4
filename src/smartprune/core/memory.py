"""Which tensors have their numbers in memory. Kernels take addresses, and do not check what is stored there."""

from __future__ import annotations

from contextlib import suppress
from operator import mul

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
        stride = tensor.stride()
        count = 1 + sum(map(mul, tensor.shape, stride)) - sum(stride)
    if storage < (tensor.storage_offset() + count) * tensor.element_size():
        raise SmartpruneError(
            f"{where}: a tensor of shape {tuple(tensor.shape)} has only {storage:,} bytes of memory left; it must have memory for "
            "all its numbers; untyped_storage().resize_() or a sharding wrapper may have freed it: restore its memory first"
        )
    if not address:
        raise NoMemoryError(tensor, where)
    return address


def check_memory(tensor: Tensor, where: str) -> None:
    """Raises an error that starts with ``where`` if the memory of a tensor was freed: torch reads it without a check."""
    with suppress(NoMemoryError):
        address_of(tensor, where)
