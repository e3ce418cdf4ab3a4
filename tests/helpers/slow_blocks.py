"""Slow references for methods: norms of blocks, and the best blocks."""

from __future__ import annotations

import math

import torch

import smartprune as sp


def slow_norms(pruner: sp.Pruner) -> list[float]:
    """L2 norm of every block, element by element."""
    out = []
    for layer, weight in zip(pruner.plan.layers, pruner.blocks.weights, strict=True):
        sums = [0.0] * layer.n
        index = layer.grid.expand(torch.arange(layer.n, dtype=torch.float64)).flatten().tolist()
        for i, value in zip(index, weight.detach().flatten().tolist(), strict=True):
            sums[round(i)] += value * value
        out += [math.sqrt(total) for total in sums]
    return out


def best(values: list[float], k: int) -> set[int]:
    """The indices of the k largest values, the first of equal ones."""
    return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
