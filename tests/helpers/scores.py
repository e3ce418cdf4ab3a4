"""Scores and costs for tests of the top-k, and a slow reference."""

import math

import numpy as np
import torch
from torch import Tensor

TEMPERATURES = (10.0, 1.0, 1e-2, 1e-3, 1e-5, 1e-7)


def bisect(x: Tensor, k: float, tau: float, cost: Tensor | None = None) -> np.ndarray:
    """Float64 bisection in z relative to every candidate score, which stays exact for |score| >> tau."""
    scores = x.detach().double().numpy()
    weight = np.ones_like(scores) if cost is None else cost.double().numpy()

    def mask(anchor: float, offset: float) -> np.ndarray:
        z = np.clip(((scores - anchor) - offset) / tau, -700, 700)
        return 1 / (1 + np.exp(-z))

    logit = math.log(k / (weight.sum() - k))
    low, high = scores.min() - tau * (logit + 1), scores.max() - tau * (logit - 1)
    for _ in range(60):
        middle = 0.5 * low + 0.5 * high
        low, high = (middle, high) if (weight * mask(middle, 0)).sum() > k else (low, middle)
    anchor = float(np.float32(low))
    low, high = (low - anchor) - 4 * tau, (high - anchor) + 4 * tau
    for _ in range(80):
        middle = 0.5 * low + 0.5 * high
        low, high = (middle, high) if (weight * mask(anchor, middle)).sum() > k else (low, middle)
    return mask(anchor, 0.5 * low + 0.5 * high)


def make_scores(kind: str, n: int, seed: int = 0) -> Tensor:
    """Scores of one kind, such as means of small weights, values close to each other, or huge ones."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return {
        "means": x.abs() * 0.02,
        "near one": 1 + 1e-5 * x,
        "equal": torch.full((n,), 0.3),
        "coarse": (x.abs() * 0.02).bfloat16().float(),
        "huge": x * 1e4,
        "sorted": x.sort().values,
    }[kind]


def make_costs(n: int, seed: int = 1) -> Tensor:
    """Costs over six decades."""
    return 10 ** (6 * torch.rand(n, generator=torch.Generator().manual_seed(seed)))


def no_start(device: str = "cpu") -> Tensor:
    """A warm-start tensor without a start."""
    return torch.full((2,), math.nan, dtype=torch.float64, device=device)
