"""Weights with random zero blocks."""

import torch
from torch import Tensor


def randomly_pruned_weight(weight: Tensor, keep: float, block: tuple[int, int] = (16, 8)) -> Tensor:
    """The weight with blocks removed at random."""
    out, channels = weight.shape[:2]
    mask = (torch.rand(-(-out // block[0]), -(-channels // block[1]), *weight.shape[2:]) < keep).to(weight.dtype)
    return weight * mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:out, :channels]
