"""Layer norms of numbers with a large mean, whose float32 sums are rounded most."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.runtime.module import Accelerated


def errors(x: Tensor) -> tuple[float, float]:
    """The largest errors of the runtime and of torch in float32."""
    model = nn.LayerNorm(x.shape[-1])
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        fast = sp.accelerate(model, example=x, backend="native")
        assert isinstance(fast, Accelerated)
        assert fast.plan(x).programs
        ours, torchs = (float((result - exact).abs().max()) for result in (fast(x), model(x)))
    return ours, torchs


@pytest.mark.parametrize("channels", [64, 768, 4096])
@pytest.mark.parametrize("mean", [10.0, 1000.0, -10000.0])
def test_a_large_mean_costs_no_more_digits_than_in_torch(mean: float, channels: int) -> None:
    torch.manual_seed(0)
    ours, torchs = errors(mean + torch.randn(2, 20, channels))
    assert ours <= 1.5 * torchs


def test_equal_numbers_become_zero() -> None:
    ours, _ = errors(torch.tensor([6.53, -1e4, 0.1]).reshape(1, 3, 1).repeat(2, 1, 3))
    assert ours < 1e-6
