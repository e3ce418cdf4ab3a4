"""A small network, and tables of invented times for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from smartprune.core.layers import Layer, plain_name
from smartprune.runtime.latency_measure import show_input
from smartprune.runtime.latency_table import Curve, LatencyTable

X = torch.zeros(1, 3, 12, 12)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 20, 3),
        nn.ReLU(),
        nn.Conv2d(20, 13, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(468, 4),
    )


def table_of(layers: Sequence[Layer], seed: int = 0, example: Any = X) -> LatencyTable:
    """Random curves for these layers."""
    draw = np.random.default_rng(seed)
    curves = {}
    for layer in layers:
        x = sorted({0, layer.params, *draw.integers(1, layer.params, 3).tolist()})
        ps = np.cumsum(draw.integers(1, 10**6, len(x))).tolist()
        curves[plain_name(layer.weight)] = Curve(tuple(x), tuple(ps))
    least, most = (sum(curve.ps[i] for curve in curves.values()) for i in (0, -1))
    middle = (least + most) // 2
    network = Curve((least, middle, most), (10**5 + least, 10**5 + middle + 999, 2 * 10**5 + most))
    grids = {plain_name(layer.weight): layer.grid.shape for layer in layers}
    return LatencyTable("a machine", 1, show_input(example), grids, curves, network)
