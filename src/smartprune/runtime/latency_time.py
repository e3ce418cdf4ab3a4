"""The time of a network under a mask, from the measured curves of its layers, and what a block costs in a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..core.hard import best_prefix, floor_blocks
from .latency_table import Curve


@dataclass(frozen=True)
class NetworkTime:
    """The picoseconds of a network under a mask."""

    sizes: tuple[Tensor, ...]  # elements of every block, by layer
    curves: tuple[Curve, ...]
    network: Curve
    limit: int

    @property
    def total(self) -> int:
        return self.network.ps[-1]

    def of(self, mask: Tensor) -> int:
        """The time with the kept blocks ``mask``, bool [n]."""
        parts = mask.cpu().split([len(sizes) for sizes in self.sizes])
        layers = zip(self.curves, self.sizes, parts, strict=True)
        return self.network.at(sum(curve.at(int(sizes[part].sum())) for curve, sizes, part in layers))

    def best(self, rank: Tensor, floor: Tensor | None = None, layer: Tensor | None = None) -> Tensor | None:
        """The highest ranked blocks, as many as the limit allows; equal ranks go to the lower index.

        ``floor`` holds the fewest blocks of each layer: its highest ranked ones, or its smallest ones where those take too long.
        None if the smallest ones take too long as well.
        """
        forced = floor_blocks(rank, floor, layer)
        if floor is not None and self.of(forced) > self.limit:
            forced = self.cheapest(floor).to(rank.device)
        return best_prefix(self.of, self.limit, rank, forced)

    def cheapest(self, floor: Tensor) -> Tensor:
        """The ``floor`` smallest blocks of each layer, bool [n]."""
        masks = []
        for sizes, count in zip(self.sizes, floor.tolist(), strict=True):
            mask = torch.zeros(len(sizes), dtype=torch.bool, device="cpu")
            mask[sizes.sort(stable=True).indices[:count]] = True
            masks.append(mask)
        return torch.cat(masks)


def block_costs(curves: Sequence[Curve], sizes: Sequence[Tensor], allowed: int) -> Tensor:
    """What each block adds to the sum over the layers, near the share of blocks that takes ``allowed`` picoseconds, int64 [n]."""
    share = _fitting_share(curves, allowed)
    return torch.cat([_block_cost(curve, size, share) for curve, size in zip(curves, sizes, strict=True)])


def largest_sum(network: Curve, ps: int) -> int:
    """The largest sum over the layers with which the network takes at most ``ps``."""
    low, high = network.x[0], network.x[-1] + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if network.at(middle) <= ps else (low, middle)
    return low


def _fitting_share(curves: Sequence[Curve], allowed: int) -> Fraction:
    """The largest multiple of 1/1024 of the elements of every layer that takes at most ``allowed`` picoseconds, at least one."""
    low, high = 0, 1025
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(curve.at(curve.x[-1] * middle // 1024) for curve in curves) <= allowed
        low, high = (middle, high) if fits else (low, middle)
    return Fraction(max(1, low), 1024)


def _block_cost(curve: Curve, sizes: Tensor, share: Fraction) -> Tensor:
    """What each block of a layer adds to its time if this share of the layer is kept, int64 [n]."""
    elements = max(1, math.floor(share * curve.x[-1]))
    return sizes.long() * (curve.at(elements) - curve.ps[0]) // elements
