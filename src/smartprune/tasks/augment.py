"""Augmentation of training images with random contrast, random colors and a blank square (``--augment``).

It wraps the data of any task whose batches begin with images, and the task needs no changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..errors import SmartpruneError
from .images import to_device
from .task import Data, every_batch

# at strength 1: the change of the contrast, of each color in standard deviations of the image, and the square's share of the
# shorter side
CONTRAST, COLOR, SQUARE = 0.3, 0.15, 0.25
STRONGEST = 3.0  # higher strengths could invert the contrast
SEED_OFFSET = 1 << 60  # keeps these random numbers apart from those that tasks draw with ``generator``


class Augmented:
    """Data with augmented images. The change of a sample depends only on the seed, the epoch and its position in the epoch."""

    def __init__(self, data: Data, strength: float) -> None:
        self.data, self.strength = data, strength

    def steps(self, size: int) -> int:
        return self.data.steps(size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Any]:
        draws: Tensor | None = None
        for number, batch in zip(count(first, every), every_batch(self.data, size, seed, epoch, first, every), strict=False):
            images, *others = self._check_images(batch)
            if draws is None:
                generator = torch.Generator().manual_seed(SEED_OFFSET + (seed << 24) + epoch)
                draws = torch.rand(self.steps(size) * size, 3 + images.shape[1], generator=generator)
                draws = to_device(draws, images.device)
            yield (augment(images, draws[number * size :][: len(images)], self.strength), *others)

    def _check_images(self, batch: Any) -> Any:
        """Returns the batch, or raises if it does not begin with images."""
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if first is not batch and isinstance(first, Tensor) and first.ndim == 4 and first.is_floating_point():
            return batch
        kind = f"{first.dtype} of shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        raise SmartpruneError(
            f"augment={self.strength:g} needs batches that begin with floating-point images [batch, channels, height, width]; "
            f"the batches of this task begin with {kind}. Use --augment 0"
        )


def augment(images: Tensor, draws: Tensor, strength: float) -> Tensor:
    """Changes each image [n, c, h, w] by its row of ``draws`` [n, 3 + c] in [0, 1): contrast, position of the square, colors.

    The changes are relative to the mean and the standard deviation of each image, so they do not depend on how images were
    normalized.
    """
    height, width = images.shape[2:]
    deviation, mean = torch.std_mean(images, dim=(2, 3), keepdim=True, correction=0)  # [n, c, 1, 1]
    contrast = 1 + strength * CONTRAST * (2 * draws[:, :1, None, None] - 1)
    colors = strength * COLOR * (2 * draws[:, 3:, None, None] - 1)
    out = (images - mean) * contrast + (mean + colors * deviation)
    side = round(strength * SQUARE * min(height, width))
    rows = interval(draws[:, 1], side, height)[:, None, :, None]
    columns = interval(draws[:, 2], side, width)[:, None, None, :]
    return torch.where(rows & columns, mean, out)


def interval(position: Tensor, side: int, length: int) -> Tensor:
    """Marks ``side`` consecutive pixels out of ``length``, [n, length]. ``position`` [n] in [0, 1) selects where they start."""
    start = (position * (length - side + 1)).floor()[:, None]  # the largest position below 1 still fits into the image
    pixels = torch.arange(length, device=position.device)
    return (pixels >= start) & (pixels < start + side)
