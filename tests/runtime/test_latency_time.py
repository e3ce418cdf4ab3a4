"""The time of a mask, and the cost of a block in a search, compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smartprune.runtime.latency_table import Curve
from smartprune.runtime.latency_time import NetworkTime, block_costs, largest_sum

CURVES = (Curve((0, 40, 100), (5, 205, 305)), Curve((0, 60), (10, 610)))
NETWORK = Curve((15, 400, 915), (1015, 1500, 2300))
SIZES = (torch.tensor([40, 30, 30]), torch.tensor([20, 20, 20]))


def test_the_largest_sum_is_the_last_one_that_fits() -> None:
    sums = np.arange(15, 916)
    times = np.floor(np.interp(sums, NETWORK.x, NETWORK.ps))
    for ps in (1015, 1200, 1499, 1500, 2000, 2299, 2300, 9999):
        assert largest_sum(NETWORK, ps) == sums[times <= ps].max()


@pytest.mark.parametrize("limit", [300, 600, 915])
def test_a_block_costs_the_slope_of_its_layer_at_the_share_that_fits(limit: int) -> None:
    shares = np.arange(1025) / 1024
    sums = sum(np.interp(np.floor(curve.x[-1] * shares), curve.x, curve.ps) for curve in CURVES)
    share = shares[sums <= limit].max()
    expected = []
    for curve, sizes in zip(CURVES, SIZES, strict=True):
        elements = np.floor(share * curve.x[-1])
        expected += [size * (np.interp(elements, curve.x, curve.ps) - curve.ps[0]) / elements for size in sizes.tolist()]
    assert block_costs(CURVES, SIZES, limit).tolist() == pytest.approx(expected, rel=0.02)


def test_the_best_mask_fits_and_no_further_block_does() -> None:
    limit = 1700
    time_of = NetworkTime(SIZES, CURVES, NETWORK, limit)
    rank = torch.tensor([0.9, 0.1, 0.4, 0.8, 0.3, 0.7])
    mask = time_of.best(rank)
    assert mask is not None
    order = rank.argsort(descending=True).tolist()
    for count in range(len(order) + 1):
        kept = torch.zeros(6, dtype=torch.bool)
        kept[order[:count]] = True
        a, b = (float(size[part].sum()) for size, part in zip(SIZES, kept.split(3), strict=True))
        layers = np.interp(a, CURVES[0].x, CURVES[0].ps) + np.interp(b, CURVES[1].x, CURVES[1].ps)
        assert time_of.of(kept) == pytest.approx(np.interp(layers, NETWORK.x, NETWORK.ps), abs=3)
        assert (time_of.of(kept) <= limit) == (count <= int(mask.sum()))
