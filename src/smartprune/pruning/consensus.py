"""How the ranks of a distributed training keep the same scores and the same mask."""

from __future__ import annotations

import torch
from torch import Tensor


def has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_distributed() -> bool:
    """Whether there is more than one rank."""
    return has_process_group() and torch.distributed.get_world_size() > 1


def average_gradient(parameter: Tensor) -> None:
    """Replaces the gradient by its mean over all ranks."""
    if is_distributed() and parameter.grad is not None:
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def same_on_all_ranks(values: Tensor) -> bool:
    """Whether every rank has equal values; NaNs are equal to each other. All ranks must call it."""
    extremes = torch.stack([values, -values]).nan_to_num_()
    torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)
    return torch.equal(extremes[0], -extremes[1])


def mask_of_first_rank(mask: Tensor) -> Tensor:
    """The hard mask of rank 0, on every rank."""
    if is_distributed():
        shared = mask.to(torch.uint8)
        torch.distributed.broadcast(shared, 0)
        mask = shared.to(torch.bool)
    return mask
