"""The CPU solver of soft_topk: many scores, warm starts and extreme values."""

import numpy as np
import pytest
import torch

from helpers.scores import make_costs, make_scores, no_start
from smartprune.topk import soft_topk


@pytest.mark.parametrize("tau", [10.0, 1e-3, 1e-7])
@pytest.mark.parametrize("kind", ["means", "near one"])
def test_sum_is_exact_for_a_million_scores(kind: str, tau: float) -> None:
    n = 1_000_000
    x = make_scores(kind, n)
    for k in (1, n // 10, n - 1):
        assert abs(float(soft_topk(x, k, tau).double().sum()) / k - 1) < 1e-5
    cost = make_costs(n)
    limit = 0.3 * float(cost.double().sum())
    assert abs(float((soft_topk(x, limit, tau, cost).double() * cost).sum()) / limit - 1) < 1e-5


def test_sum_is_exact_for_ten_million_scores() -> None:
    n = 10_000_000
    x = make_scores("means", n)
    for tau in (1e-2, 1e-6):
        assert abs(float(soft_topk(x, n // 10, tau).sum(dtype=torch.float64)) / (n // 10) - 1) < 1e-5


@pytest.mark.parametrize("tau", [1e-2, 1e-5, 1e-7])
def test_float32_agrees_with_float64_for_many_scores(tau: float) -> None:
    x = make_scores("means", 200_000)
    single, double = soft_topk(x, 6_000, tau), soft_topk(x.double(), 6_000, tau)
    assert float((single - double).abs().max()) < 2e-4


def test_warm_starts_follow_a_falling_temperature() -> None:
    x, warm = make_scores("means", 50_000), no_start()
    for tau in np.geomspace(1, 1e-6, 60):
        mask = soft_topk(x, 1500, float(tau), warm=warm)
        assert abs(float(mask.double().sum()) / 1500 - 1) < 1e-5
    theta = float(warm.sum())
    assert int((x > theta).sum()) == pytest.approx(1500, abs=1)


@pytest.mark.parametrize("warm", [None, (1e30, 0.0), (-1e30, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_scores_beyond_a_huge_gap_share_the_mask(dtype: torch.dtype, warm: tuple[float, float] | None) -> None:
    """About 2^100 temperatures lie between the scores, too many for bisection."""
    x = torch.tensor([1e30] * 2049 + [-1e30] * 2048, dtype=dtype)
    mask = soft_topk(x, 2048, 1e-3, warm=None if warm is None else torch.tensor(warm, dtype=torch.float64))
    assert mask.double().sum().item() == pytest.approx(2048, rel=1e-6 if dtype == torch.float32 else 1e-11)
    assert mask[:2049].tolist() == pytest.approx([2048 / 2049] * 2049, rel=1e-6)


def test_k_may_exceed_the_sum_of_costs_by_rounding() -> None:
    cost = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    k = float(cost.double().sum()) * (1 + 2e-7)
    assert float(soft_topk(make_scores("means", 100_000), k, 0.1, cost).min()) == 1.0


@pytest.mark.parametrize("size", [1e300, 1e-46, 1e30, 1e-30])
def test_costs_outside_float32_are_rescaled(size: float) -> None:
    """Only the ratios of costs matter."""
    x, cost = make_scores("means", 50), make_costs(50).double()
    expected = soft_topk(x, 20.0, 1e-2, cost)
    assert torch.allclose(soft_topk(x, 20.0 * size, 1e-2, cost * size), expected, atol=1e-5)
