"""Training pictures that are harder to know by heart: other contrast and colours, and a blank square (``--augment``).

It stands around the data of any task whose batches begin with pictures, and asks nothing of the task itself.
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

CONTRAST, COLOUR, SQUARE = 0.3, 0.15, 0.25  # of the contrast, of a picture's spread, of its shorter side; at strength 1
STRONGEST = 3.0  # beyond it contrast would turn round
APART = 1 << 60  # these random numbers are none of those that a task draws by ``generator``


class Augmented:
    """The data with its pictures changed. What is drawn for a sample depends on seed, epoch and its place in the epoch alone."""

    def __init__(self, data: Data, strength: float) -> None:
        self.data, self.strength = data, strength

    def steps(self, size: int) -> int:
        return self.data.steps(size)

    def batches(self, size: int, seed: int, epoch: int, first: int = 0, every: int = 1) -> Iterator[Any]:
        drawn: Tensor | None = None
        for number, batch in zip(count(first, every), every_batch(self.data, size, seed, epoch, first, every), strict=False):
            pictures, *others = self._parts(batch)
            if drawn is None:
                draw = torch.Generator().manual_seed(APART + (seed << 24) + epoch)
                drawn = torch.rand(self.steps(size) * size, 3 + pictures.shape[1], generator=draw)
                drawn = to_device(drawn, pictures.device)
            yield (augment(pictures, drawn[number * size :][: len(pictures)], self.strength), *others)

    def _parts(self, batch: Any) -> Any:
        first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if first is not batch and isinstance(first, Tensor) and first.ndim == 4 and first.is_floating_point():
            return batch
        found = f"{first.dtype} of shape {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        raise SmartpruneError(
            f"augment={self.strength:g} is for batches that begin with pictures, [batch, channels, height, width] in floating "
            f"point; this task's begin with {found}. Use --augment 0"
        )


def augment(pictures: Tensor, draws: Tensor, strength: float) -> Tensor:
    """Each picture [n, c, h, w] changed by its row of ``draws`` [n, 3 + c] in [0, 1): contrast, place of the square, colours.

    In units of the picture's own mean and spread, so that it is the same change however pictures were normalised.
    """
    height, width = pictures.shape[2:]
    spread, mean = torch.std_mean(pictures, dim=(2, 3), keepdim=True, correction=0)  # [n, c, 1, 1]
    contrast = 1 + strength * CONTRAST * (2 * draws[:, :1, None, None] - 1)
    colours = strength * COLOUR * (2 * draws[:, 3:, None, None] - 1)
    out = (pictures - mean) * contrast + (mean + colours * spread)
    side = round(strength * SQUARE * min(height, width))
    rows = within(draws[:, 1], side, height)[:, None, :, None]
    columns = within(draws[:, 2], side, width)[:, None, None, :]
    return torch.where(rows & columns, mean, out)


def within(place: Tensor, side: int, length: int) -> Tensor:
    """Which of ``length`` pixels are the ``side`` ones from a place on, [n, length]; ``place`` [n] is a share of where they fit."""
    start = (place * (length - side + 1)).floor()[:, None]  # of the largest number drawn, too, within the picture
    line = torch.arange(length, device=place.device)
    return (line >= start) & (line < start + side)
