"""A ranking between the magnitudes of blocks and their shares of the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.vector import Blocks

SHARE_WEIGHT = 0.25  # 0 ranks by magnitude, 1 by share of the layer; in between, small layers keep more than magnitude gives them
SMALLEST = 1e-30  # of the largest mean square, so that a block of zeros has a finite logarithm


def balanced_rank(blocks: Blocks) -> Tensor:
    """The log of each block's mean square, moved a quarter of the way to the log of its share of the layer, float32 [n]."""
    squares = blocks.mean(lambda weight: weight.double().square())
    smallest = (squares.max() * SMALLEST).clamp(min=torch.finfo(torch.float64).tiny)
    magnitude = squares.clamp(min=smallest).log().float()
    return (1 - SHARE_WEIGHT) * magnitude + SHARE_WEIGHT * blocks.share()
