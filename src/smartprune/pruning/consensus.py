"""What the ranks of a user's own training say to each other about scores and masks."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def distributed() -> bool:
    return grouped() and torch.distributed.get_world_size() > 1


def average(parameter: Tensor) -> None:
    """Every rank gets the mean of all ranks' gradients."""
    if distributed() and parameter.grad is not None:
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


def same_everywhere(mine: Tensor) -> bool:
    """Whether every rank has these numbers, or the same that are none; all ranks must ask together."""
    ends = torch.stack([mine, -mine]).nan_to_num_()
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    return torch.equal(ends[0], -ends[1])


def agree(hard: Tensor) -> Tensor:
    """Every rank takes the first rank's mask."""
    if distributed():
        shared = hard.to(torch.uint8)
        torch.distributed.broadcast(shared, 0)
        hard = shared.to(torch.bool)
    return hard
