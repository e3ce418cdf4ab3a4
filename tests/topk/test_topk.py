"""soft_topk and hard_topk against slow references that share no code with them."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers.device_syncs import DeviceSyncs
from smartprune import topk
from smartprune.errors import SmartpruneError
from smartprune.topk import check_device, device_errors, eager, hard_topk, soft_topk

TAUS = (10.0, 1.0, 1e-2, 1e-3, 1e-5, 1e-7)


def bisect(x: Tensor, k: float, tau: float, cost: Tensor | None = None) -> np.ndarray:
    """Float64 bisection in z relative to every candidate score, so that no digit is lost for |score| >> tau."""
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


def make(kind: str, n: int, seed: int = 0) -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return {
        "means": x.abs() * 0.02,
        "near one": 1 + 1e-5 * x,
        "equal": torch.full((n,), 0.3),
        "coarse": (x.abs() * 0.02).bfloat16().float(),
        "huge": x * 1e4,
        "sorted": x.sort().values,
    }[kind]


def costs(n: int, seed: int = 1) -> Tensor:
    return 10 ** (6 * torch.rand(n, generator=torch.Generator().manual_seed(seed)))


def no_start() -> Tensor:
    return torch.full((2,), math.nan, dtype=torch.float64)


# The sum.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "coarse", "huge", "sorted"])
@pytest.mark.parametrize("n", [2, 3, 17, 1000, 40_000])
def test_sum_is_exact_for_every_temperature(kind: str, n: int, weighted: bool) -> None:
    x = make(kind, n)
    cost = costs(n) if weighted else None
    total = float(n if cost is None else cost.double().sum())
    for k in {1.0, float(n // 3 or 1), float(n // 2), n - 1.0}:
        k = k * total / n
        for tau in TAUS:
            mask = soft_topk(x, k, tau, cost)
            got = float((mask.double() if cost is None else mask.double() * cost.double()).sum())
            assert mask.dtype == torch.float32
            assert abs(got / k - 1) < 1e-5, (k, tau)
            assert bool(((mask >= 0) & (mask <= 1)).all())


@pytest.mark.parametrize("tau", [10.0, 1e-3, 1e-7])
@pytest.mark.parametrize("kind", ["means", "near one"])
def test_sum_of_a_million(kind: str, tau: float) -> None:
    n = 1_000_000
    x = make(kind, n)
    for k in (1, n // 10, n - 1):
        assert abs(float(soft_topk(x, k, tau).double().sum()) / k - 1) < 1e-5
    cost = costs(n)
    limit = 0.3 * float(cost.double().sum())
    assert abs(float((soft_topk(x, limit, tau, cost).double() * cost).sum()) / limit - 1) < 1e-5


def test_sum_of_ten_million() -> None:
    n = 10_000_000
    x = make("means", n)
    for tau in (1e-2, 1e-6):
        assert abs(float(soft_topk(x, n // 10, tau).sum(dtype=torch.float64)) / (n // 10) - 1) < 1e-5


@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
@pytest.mark.parametrize("n", [2, 300])
def test_float64_sum(kind: str, n: int) -> None:
    x = make(kind, n).double()
    cost = costs(n).double()
    for tau in TAUS:
        for share in (1 / n, 0.5, 1 - 1 / n):
            assert abs(float(soft_topk(x, share * n, tau).sum()) / (share * n) - 1) < 1e-10
            k = share * float(cost.sum())
            assert abs(float((soft_topk(x, k, tau, cost) * cost).sum()) / k - 1) < 1e-10


@pytest.mark.parametrize("kind", ["means", "near one", "coarse", "sorted"])
@pytest.mark.parametrize("tau", [1.0, 1e-2, 1e-4, 1e-6])
def test_elements_equal_slow_bisection(kind: str, tau: float) -> None:
    x = make(kind, 2000)
    cost = costs(2000)
    # float32: z is exact to a few ulp of itself
    np.testing.assert_allclose(soft_topk(x, 300, tau), bisect(x, 300, tau), atol=5e-5)
    np.testing.assert_allclose(soft_topk(x.double(), 300, tau), bisect(x, 300, tau), atol=1e-9)
    k = 0.2 * float(cost.double().sum())
    np.testing.assert_allclose(soft_topk(x, k, tau, cost), bisect(x, k, tau, cost), atol=5e-5)
    np.testing.assert_allclose(soft_topk(x.double(), k, tau, cost.double()), bisect(x, k, tau, cost), atol=1e-9)


@pytest.mark.parametrize("tau", [1e-2, 1e-5, 1e-7])
def test_window_and_sample_agree_with_float64(tau: float) -> None:
    x = make("means", 200_000)
    single, double = soft_topk(x, 6_000, tau), soft_topk(x.double(), 6_000, tau)
    assert float((single - double).abs().max()) < 2e-4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_small_problem(data: st.DataObject) -> None:
    finite = st.floats(-1e4, 1e4, width=32)
    x = torch.tensor(data.draw(st.lists(finite, min_size=2, max_size=12)))
    cost = torch.tensor(data.draw(st.lists(st.floats(0, 1e3, width=32), min_size=len(x), max_size=len(x))))
    tau = 10 ** data.draw(st.floats(-7, 1))
    total = float(cost.double().sum())
    k = data.draw(st.floats(0.01, 0.99)) * total
    x.requires_grad_()
    mask = soft_topk(x, k, tau, cost)
    mask.square().sum().backward()
    assert abs(float((mask.detach().double() * cost).sum()) - k) <= 1e-5 * k + 1e-30
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    order = x.detach().argsort()
    assert bool((mask.detach()[order].diff() >= 0).all())


def test_ends() -> None:
    cost = torch.tensor([1.0, 2.0, 0.0])
    for k, c, value in ((0, None, 0.0), (3, None, 1.0), (0, cost, 0.0), (3, cost, 1.0)):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        warm = no_start()
        mask = soft_topk(x, k, 0.1, c, warm=warm)
        mask.sum().backward()
        assert mask.tolist() == [value] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 3
        assert bool(warm.isnan().all())


def test_zero_cost_blocks_follow_the_threshold_and_do_not_count() -> None:
    x = torch.tensor([3.0, 2.0, 1.0, 0.0])
    mask = soft_topk(x, 1, 0.01, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert mask.tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)


def test_one_score() -> None:
    assert soft_topk(torch.tensor([5.0]), 0.25, 0.1).tolist() == pytest.approx([0.25])


def test_k_and_tau_may_be_tensors() -> None:
    x = make("means", 50)
    expected = soft_topk(x, 10, 0.01)
    got = soft_topk(x, torch.tensor(10), torch.tensor(0.01, dtype=torch.float64))
    assert torch.equal(got, expected)


# Warm starts and repeatability.


@pytest.mark.parametrize("n", [1000, 100_000])
@pytest.mark.parametrize("tau", [1.0, 1e-3, 1e-6])
def test_warm_equals_cold(n: int, tau: float) -> None:
    x = make("means", n).double()
    cold, warm = no_start(), no_start()
    reference = soft_topk(x, n // 10, tau, warm=cold)
    for start in (x.mean().item(), -50.0, 1e6, math.inf, cold.sum().item()):
        warm[:] = torch.tensor([start, 0.0])
        assert float((soft_topk(x, n // 10, tau, warm=warm) - reference).abs().max()) < 1e-9
        assert float(warm.sum() - cold.sum()) == pytest.approx(0, abs=1e-8 * tau + 1e-15)


def test_warm_survives_cooling() -> None:
    x, warm = make("means", 50_000), no_start()
    for tau in np.geomspace(1, 1e-6, 60):
        mask = soft_topk(x, 1500, float(tau), warm=warm)
        assert abs(float(mask.double().sum()) / 1500 - 1) < 1e-5
    theta = float(warm.sum())
    assert int((x > theta).sum()) == pytest.approx(1500, abs=1)


@pytest.mark.parametrize("n", [500, 80_000])
def test_same_inputs_give_the_same_bits(n: int) -> None:
    x = make("means", n)
    for warm in (None, torch.tensor([0.03, 1e-9], dtype=torch.float64)):
        runs = []
        for _ in range(2):
            leaf, start = x.clone().requires_grad_(), None if warm is None else warm.clone()
            mask = soft_topk(leaf, n // 7, 1e-4, warm=start)
            mask.square().sum().backward()
            assert leaf.grad is not None
            runs.append((mask.detach(), leaf.grad, start))
        assert torch.equal(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])
        assert warm is None or torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_of_warm_are_start_and_end(backend: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    n, tau = 40_000, 1e-4
    x, cost = make("means", n), costs(n) if weighted else None
    k = 0.1 * float(n if cost is None else cost.double().sum())
    theta = torch.stack((torch.tensor([0.03, 1e-9], dtype=torch.float64), no_start()))
    place, start = theta[0].clone(), theta[0].clone()
    expected = soft_topk(x, k, tau, cost, warm=place)
    for _ in range(3):  # the search starts at the same place again and again, hence the same bits
        assert torch.equal(soft_topk(x, k, tau, cost, warm=theta), expected)
        assert torch.equal(theta[0], start)
        assert torch.equal(theta[1], place)
    soft_topk(x, 0, tau, cost, warm=theta)
    assert torch.equal(theta[0], start)
    assert bool(theta[1].isnan().all())


# The gradient.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_gradient_equals_finite_differences(tau: float, weighted: bool) -> None:
    x = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    cost = torch.tensor([1.0, 0.0, 5.0, 2.0, 1.0, 0.5, 3.0, 1.0, 7.0], dtype=torch.float64) if weighted else None
    torch.autograd.gradcheck(lambda s: soft_topk(s, 3.3, tau, cost), (x,), eps=1e-7, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_second_derivative_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x = make("means", 50).requires_grad_()
    plain, tracked = (
        torch.autograd.grad(soft_topk(x, 10, 1e-2).square().sum(), x, create_graph=create)[0] for create in (False, True)
    )
    assert torch.equal(plain, tracked)
    with pytest.raises(SmartpruneError, match="got a second derivative"):
        tracked.sum().backward()


@pytest.mark.parametrize("ask", ["backward", "grad", "hessian"])
def test_second_derivative_of_a_loss_that_is_linear_in_the_mask_is_refused(ask: str) -> None:
    """What comes in does not depend on the scores then; the second derivative was taken for zero."""
    x = make("means", 50).requires_grad_()
    (first,) = torch.autograd.grad(soft_topk(x, 10, 1e-2)[0], x, create_graph=True)
    asked: dict[str, Callable[[], object]] = {
        "backward": lambda: (first.square().sum() + x.sum()).backward(),
        "grad": lambda: torch.autograd.grad(first.square().sum(), x),
        "hessian": lambda: torch.autograd.functional.hessian(lambda scores: soft_topk(scores, 10, 1e-2)[0], x.detach()),
    }
    with pytest.raises(SmartpruneError, match="got a second derivative"):
        asked[ask]()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_costs_modified_between_forward_and_backward(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    dtype = torch.float64 if backend == "torch" else torch.float32  # in which it uses them as they are
    x, cost = make("means", 50).to(dtype).requires_grad_(), torch.full((50,), 2.0, dtype=dtype)
    mask = soft_topk(x, 20.0, 1e-2, cost)
    cost[0] = 100
    with pytest.raises(SmartpruneError, match="cost was modified in place"):
        mask[0].backward()
    copied = soft_topk(x, 20.0, 1e-2, cost.int())  # a copy is used
    cost[0] = 2
    copied[0].backward()


@pytest.mark.parametrize(("n", "kept", "k"), [(100_000, 2, 1.0), (1_000_000, 13, 10.0), (30_000, 3, 2.9)])
def test_plain_path_where_few_of_very_many_are_kept(n: int, kept: int, k: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the sum lies in a tail of equal scores: steps on the sum itself came down by one tau each, and were too few."""
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = torch.full((n,), -2.1)
    x[:kept] = 0.0
    assert float(soft_topk(x, k, 1.0).double().sum()) == pytest.approx(k, rel=1e-6)


def test_plain_path_with_very_unequal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        n = int(torch.randint(2, 200, (1,), generator=draw))
        x = torch.randn(n, generator=draw, dtype=torch.float64)
        cost = 10 ** (torch.rand(n, generator=draw, dtype=torch.float64) * 10 - 5)
        k = float(cost.sum()) * 10 ** float(-6 * torch.rand(1, generator=draw))
        tau = 10 ** float(torch.rand(1, generator=draw) * 4 - 3)
        assert float((soft_topk(x, k, tau, cost) * cost).sum()) == pytest.approx(k, rel=1e-9)


@pytest.mark.parametrize("size", [1e300, 1e-46, 1e30, 1e-30])
def test_costs_that_float32_does_not_hold(size: float) -> None:
    """Only their ratios count."""
    x, cost = make("means", 50), costs(50).double()
    expected = soft_topk(x, 20.0, 1e-2, cost)
    assert torch.allclose(soft_topk(x, 20.0 * size, 1e-2, cost * size), expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_without_gradient_the_mask_has_the_same_bits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x, cost = make("means", 1000), costs(1000)
    for c in (None, cost, cost.clone().requires_grad_()):
        expected = soft_topk(x.clone().requires_grad_(), 200, 1e-3, c)
        assert expected.requires_grad
        got = soft_topk(x, 200, 1e-3, c)
        assert not got.requires_grad
        assert torch.equal(got, expected.detach())
        with torch.no_grad():
            assert not soft_topk(x.clone().requires_grad_(), 200, 1e-3, c).requires_grad


@pytest.mark.parametrize("kind", ["means", "near one", "coarse", "equal"])
@pytest.mark.parametrize("n", [100, 70_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_equals_formula(kind: str, n: int, weighted: bool) -> None:
    x = make(kind, n)
    cost = costs(n).clamp(max=100.0) if weighted else None
    c = torch.ones(n).double() if cost is None else cost.double()
    g = torch.randn(n, generator=torch.Generator().manual_seed(5))
    k = 0.2 * float(c.sum())
    for tau in (1.0, 1e-3, 1e-5):
        leaf = x.clone().requires_grad_()
        soft_topk(leaf, k, tau, cost).backward(g)
        m = torch.from_numpy(bisect(x, k, tau, cost))
        v = m * (1 - m)
        expected = v / tau * (g - c * (v * g).sum() / (c * v).sum())
        assert leaf.grad is not None
        assert float((leaf.grad - expected).abs().max()) < 3e-4 * max(float(expected.abs().max()), 0.01 / tau)


@pytest.mark.parametrize("gap", [1e-4, 1.0, 1e4])
def test_huge_gaps_give_a_zero_gradient(gap: float) -> None:
    x = torch.tensor([gap, gap, 0.0, 0.0], requires_grad=True)
    mask = soft_topk(x, 2, 1e-7)
    mask.backward(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    assert mask.tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * 4


def test_ties_share_and_keep_a_finite_gradient() -> None:
    x = torch.tensor([1e4, 1e4, 1e4, 0.0], requires_grad=True)
    mask = soft_topk(x, 2, 1e-7)
    mask[0].backward()
    assert mask.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0], abs=1e-5)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2 / 9 * 2 / 3 * 1e7, -2 / 27 * 1e7, -2 / 27 * 1e7, 0], rel=1e-4)


@pytest.mark.parametrize("warm", [None, (1e30, 0.0), (-1e30, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_beyond_a_gap_share_what_is_left(dtype: torch.dtype, warm: tuple[float, float] | None) -> None:
    """Some 2^100 temperatures lie between the scores: more than halvings find their way through."""
    x = torch.tensor([1e30] * 2049 + [-1e30] * 2048, dtype=dtype)
    mask = soft_topk(x, 2048, 1e-3, warm=None if warm is None else torch.tensor(warm, dtype=torch.float64))
    assert mask.double().sum().item() == pytest.approx(2048, rel=1e-6 if dtype == torch.float32 else 1e-11)
    assert mask[:2049].tolist() == pytest.approx([2048 / 2049] * 2049, rel=1e-6)


@pytest.mark.parametrize("warm", [None, (1e30, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e16, -3e29])
def test_equal_scores_share_whatever_their_size(size: float, dtype: torch.dtype, warm: tuple[float, float] | None) -> None:
    """Every mask is k over the sum of the costs, also where tau is less than a rounding error of the scores."""
    cost = torch.tensor([1.0, 2.0, 4.0, 9.0, 16.0])
    for k in (0.001, 3.0, 31.5):
        start = None if warm is None else torch.tensor(warm, dtype=torch.float64)
        mask = soft_topk(torch.full((5,), size, dtype=dtype), k, 1e-4, cost, warm=start)
        assert mask.tolist() == pytest.approx([k / 32] * 5, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_beyond_float16_stays_finite(compiled: bool) -> None:
    x = torch.full((4,), 0.5, dtype=torch.float16, requires_grad=True)
    made = topk._compiled(x, 2, 1e-7, None, None) if compiled else soft_topk(x, 2, 1e-7)
    made.backward(torch.tensor([1.0, 0.0, 0.0, -1.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [65504.0, 0.0, 0.0, -65504.0]
    x.grad = None
    soft_topk(x, 2, 1e-7).backward(torch.tensor([math.nan, 0.0, 0.0, 0.0]))
    assert x.grad is not None
    assert bool(x.grad.isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores(dtype: torch.dtype) -> None:
    x = make("means", 5000).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    masks = [soft_topk(leaf, 700, 1e-3) for leaf in (x, wide)]
    for mask in masks:
        mask.square().sum().backward()
    assert masks[0].dtype == torch.float32
    assert torch.equal(masks[0], masks[1])
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert wide.grad is not None
    assert torch.equal(x.grad, wide.grad.to(dtype))


def test_autocast_changes_nothing() -> None:
    x = make("means", 5000)
    with torch.autocast("cpu", torch.bfloat16):
        inside = soft_topk(x, 700, 1e-3)
    assert torch.equal(inside, soft_topk(x, 700, 1e-3))


def test_not_contiguous() -> None:
    x = make("means", 400)
    leaf = x.clone().requires_grad_()
    soft_topk(leaf[::2], 30, 1e-3).square().sum().backward()
    dense = x[::2].clone().requires_grad_()
    soft_topk(dense, 30, 1e-3).square().sum().backward()
    assert leaf.grad is not None
    assert dense.grad is not None
    assert torch.equal(leaf.grad[::2], dense.grad)


def test_backward_twice_without_retain() -> None:
    x = make("means", 100).requires_grad_()
    mask = soft_topk(x, 10, 1e-2)
    parts = [mask[:50] * 1.0, mask[50:] * 1.0]
    for part in parts:  # the node of soft_topk is passed once per part
        part.sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) < 1e-4  # the sum of the mask is constant


def test_reentrant_checkpointing() -> None:
    grads = []
    for reentrant in (True, False, None):
        x, w = make("means", 64).requires_grad_(), torch.randn(64, generator=torch.Generator().manual_seed(1))
        mask = soft_topk(x, 10, 1e-2)
        h = w.clone().requires_grad_()

        def segment(a: Tensor, m: Tensor) -> Tensor:
            return torch.tanh(a * m)

        for _ in range(2):
            h = segment(h, mask) if reentrant is None else checkpoint(segment, h, mask, use_reentrant=reentrant)
        h.sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert grads[2] is not None
    assert torch.allclose(grads[0], grads[2])
    assert torch.allclose(grads[1], grads[2])


def test_scores_changed_before_backward() -> None:
    x = make("means", 100).requires_grad_()
    mask = soft_topk(x, 10, 1e-2)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(SmartpruneError, match=r"modified in place between forward and backward.*after backward\(\)"):
        mask.sum().backward()


def test_compiles_once_while_tau_cools() -> None:
    compiled = []

    def spy(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    counts = []
    torch._dynamo.reset()
    step = torch.compile(masked_loss, backend=spy, fullgraph=True)
    for tau in (0.1, 0.05, 0.01, 0.001):
        compare_gradients(step, tau)
        counts.append(len(compiled))
    torch._dynamo.reset()
    assert counts == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports torch.jit
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    compare_gradients(torch.compile(masked_loss, backend="inductor"), 0.01)
    torch._dynamo.reset()


def test_compiled_updates_the_warm_start_and_raises() -> None:
    def run(x: Tensor, k: Tensor, warm: Tensor) -> Tensor:
        return soft_topk(x, k, 0.01, torch.ones_like(x), warm=warm)

    torch._dynamo.reset()
    step = torch.compile(run, backend="aot_eager", fullgraph=True)
    x, warm, expected = make("means", 100), no_start(), no_start()
    assert torch.equal(step(x, torch.tensor(10), warm), soft_topk(x, 10, 0.01, torch.ones(100), warm=expected))
    assert torch.equal(warm, expected)
    with pytest.raises(SmartpruneError, match=re.escape("k=101.0 is outside [0, 100]")):
        step(x, torch.tensor(101), warm)
    theta = torch.stack((no_start(), no_start()))
    step(x, torch.tensor(10), theta)
    assert bool(theta[0].isnan().all())
    assert torch.equal(theta[1], expected)
    torch._dynamo.reset()


def test_import_does_not_load_the_compiler() -> None:
    # without the package's __init__, which imports everything else
    code = f"""
import sys, types
package = types.ModuleType("smartprune")
package.__path__ = [{str(Path(topk.__file__).parents[1])!r}]
sys.modules["smartprune"] = package
import torch
loaded = "torch._dynamo" in sys.modules
import smartprune.topk
assert ("torch._dynamo" in sys.modules) == loaded
assert "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def masked_loss(x: Tensor, w: Tensor, tau: Tensor) -> Tensor:
    return (soft_topk(x * 1.0, 10, tau) * w.exp()).square().sum()


def compare_gradients(step: Callable[[Tensor, Tensor, Tensor], Tensor], tau: float) -> None:
    w = torch.randn(100, generator=torch.Generator().manual_seed(1))
    x, y = make("means", 100).requires_grad_(), make("means", 100).requires_grad_()
    step(x, w, torch.tensor(tau)).backward()
    masked_loss(y, w, torch.tensor(tau)).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad)


# The plain tensor path that serves CUDA without Triton must give the same operator.


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
def test_plain_path(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 500
    x, cost = make(kind, n), costs(n) if weighted else None
    g = torch.randn(n, generator=torch.Generator().manual_seed(5))
    total = float(n if cost is None else cost.double().sum())
    for tau in TAUS:
        for share in (1 / n, 0.3, 1 - 1 / n):
            k, results = share * total, []
            for backend in ("auto", "torch"):
                monkeypatch.setattr(topk, "BACKEND", backend)
                leaf, warm = x.clone().requires_grad_(), no_start()
                mask = soft_topk(leaf, k, tau, cost, warm=warm)
                again = soft_topk(leaf, k, tau, cost, warm=warm)
                assert float((mask - again).detach().abs().max()) < 3e-4
                mask.backward(g)
                results.append((mask.detach(), leaf.grad))
            got = float((results[1][0].double() * (1 if cost is None else cost)).sum())
            assert abs(got / k - 1) < 1e-5
            assert float((results[0][0] - results[1][0]).abs().max()) < 3e-4
            scale = float(results[0][1].abs().max()) + 1e-2 / tau
            assert float((results[0][1] - results[1][1]).abs().max()) < 2e-3 * scale


def awkward(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x, u = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    return {
        "cauchy": torch.tan(math.pi * (u - 0.5)),
        "two clouds": x * 1e-3 + (u < 0.5),
        "twelve decades": 10 ** (12 * u - 8),
        "one far above": torch.cat((x[1:] * 1e-3, torch.tensor([1e4]))),
        "one far below": torch.cat((x[1:] * 1e-3, torch.tensor([-1e4]))),
        "two values": (u < 0.3).float(),
        "clusters": (3 * x).round() + 1e-4 * u,
    }[kind]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["cauchy", "two clouds", "twelve decades", "one far above", "one far below", "two values", "clusters"],
)
def test_plain_path_with_awkward_scores(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (2, 17, 1000):
        x, cost = awkward(kind, n), costs(n) if weighted else None
        total = float(n if cost is None else cost.double().sum())
        wide = None if cost is None else cost.double()
        for tau in (1e2, *TAUS):
            for share in (1 / n, 0.1, 0.500001, 0.77, 1 - 1 / n):
                monkeypatch.setattr(topk, "BACKEND", "auto")
                expected = soft_topk(x.double(), share * total, tau, wide)
                monkeypatch.setattr(topk, "BACKEND", "torch")
                for scores, c, most in ((x, cost, 1e-6), (x.double(), wide, 1e-10)):
                    got = soft_topk(scores, share * total, tau, c).double()
                    assert abs(float((got if wide is None else got * wide).sum()) / (share * total) - 1) < most
                    assert float((got - expected).abs().max()) < 3e-6, (n, tau, share)


@pytest.mark.parametrize("n", [100_000, 1_000_000])
def test_plain_path_is_exact_for_many_scores(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    for kind in ("means", "near one"):
        x = make(kind, n)
        for tau in (10.0, 1e-3, 1e-7):
            for k in (1, n // 10, n - 1):
                assert abs(float(soft_topk(x, k, tau).double().sum()) / k - 1) < 1e-6


class Count(TorchDispatchMode):
    """How many operations run; views and allocations start nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        free = ("view", "select", "unbind", "detach", "empty")
        self.count += not any(name in str(func) for name in free)
        return func(*args, **(kwargs or {}))


def test_plain_path_stays_where_nothing_is_soft(monkeypatch: pytest.MonkeyPatch) -> None:
    # The best blocks cost k exactly, and theta lies in a gap: what rounding leaves of a sum moves it nowhere.
    monkeypatch.setattr(topk, "BACKEND", "torch")
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        x, c = torch.randn(40, generator=g).double(), torch.randint(1, 20, (40,), generator=g).double()
        k = float(c[x.argsort(descending=True)[: 1 + seed % 38]].sum())
        assert abs(float((c * soft_topk(x, k, 1e-5, c)).sum()) - k) <= 1e-10 * k


@pytest.mark.parametrize("weighted", [False, True])
def test_plain_path_waits_for_no_gpu(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="meta")
    monkeypatch.setattr(eager, "device_flag", lambda device: (flag, None, flag))
    x = torch.empty(100, device="meta", requires_grad=True)
    k, tau = (torch.empty((), dtype=torch.float64, device="meta") for _ in range(2))
    warm = torch.empty(2, 2, dtype=torch.float64, device="meta")
    with DeviceSyncs() as syncs:
        soft_topk(x, k, tau, torch.empty(100, device="meta") if weighted else None, warm=warm).sum().backward()
    assert x.grad is not None
    assert syncs.operations == []


def test_plain_path_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every operation is a launch: 50 bisections take 460.
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = make("means", 100).requires_grad_()
    with Count() as forward:
        mask = soft_topk(x, 10, 1e-2)
    with Count() as backward:
        mask.backward(torch.ones(100))
    assert forward.count <= 225
    assert backward.count <= 25


def test_plain_path_ends_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for k, value in ((0, 0.0), (3, 1.0)):
        x.grad = None
        mask = soft_topk(x, k, 0.1)
        mask.sum().backward()
        assert mask.tolist() == [value] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 3
    with pytest.raises(SmartpruneError, match="scores hold NaN or infinity"):
        soft_topk(torch.tensor([1.0, math.nan]), 1, 0.1)
    with pytest.raises(SmartpruneError, match="cost holds a negative number"):
        soft_topk(torch.ones(2), 1, 0.1, torch.tensor([3.0, -1.0]))
    monkeypatch.setattr(topk, "BACKEND", "fast")
    with pytest.raises(SmartpruneError, match="SMARTPRUNE_TOPK='fast' is unknown; use auto, torch or triton"):
        soft_topk(x, 1, 0.1)


# Errors: where, what was given, what is allowed, what to do.

X = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: soft_topk(torch.tensor([1.0, math.nan]), 1, 0.1),
            "soft_topk: scores hold NaN or infinity; scores must",
        ),
        (lambda: soft_topk(torch.tensor([1.0, math.inf]), 1, 0.1), "finite: lower their learning rate or clip their"),
        (lambda: soft_topk(X, 1, 0), "soft_topk: tau=0.0: tau is outside [1e-30, 1e+30] or NaN; give a positive"),
        (lambda: soft_topk(X, 1, -0.1), "tau=-0.1"),
        (lambda: soft_topk(X, 1, math.nan), "tau=nan"),
        (lambda: soft_topk(X, 1, torch.tensor(math.inf)), "tau=inf"),
        (lambda: soft_topk(X, 4, 0.1), "soft_topk: k=4.0 is outside [0, 3]; give the number (or the cost) to keep"),
        (lambda: soft_topk(X, -1, 0.1), "k=-1.0 is outside [0, 3]"),
        (lambda: soft_topk(X, math.nan, 0.1), "k=nan is outside [0, 3]"),
        (lambda: soft_topk(X, 7, 0.1, 2 * torch.ones(3)), "k=7.0 is outside [0, 6]"),
        (lambda: soft_topk(X, -1, 0.1, 2 * torch.ones(3)), "k=-1.0 is outside [0, sum(cost)]"),
        (lambda: soft_topk(X, 1, 0.1, torch.tensor([1.0, -1.0, 2.0])), "cost holds a negative number, NaN or infinity"),
        (lambda: soft_topk(X, 1, 0.1, torch.tensor([1.0, math.nan, 2.0])), "costs must be finite and >= 0: correct"),
        (lambda: soft_topk(X, 1, 0.1, torch.ones(2)), "cost is float32 [2] on cpu; it must be real, [3] and on cpu"),
        (lambda: soft_topk(X, torch.ones(2), 0.1), "k is float32 [2] on cpu; give a number or a 0-dim tensor"),
        (lambda: soft_topk(X, "2", 0.1), "k='2' is not a number"),  # type: ignore[arg-type]
        (lambda: soft_topk(X, 1, True), "tau=True is not a number"),
        (
            lambda: soft_topk(X[:0], 0, 0.1),
            "scores are float32 [0] on cpu; they must be one non-empty vector of float64",
        ),
        (lambda: soft_topk(X[None], 0, 0.1), "scores are float32 [1, 3] on cpu"),
        (lambda: soft_topk(X.int(), 0, 0.1), "scores are int32 [3] on cpu"),
        (
            lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(2)),
            "warm is float32 [2] on cpu; it must be float64 [2] on cpu",
        ),
        (
            lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(3, 2).double()),
            "warm is float64 [3, 2] on cpu; it must be float64 [2] on cpu, or [2, 2], contiguous",
        ),
        (lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(2).double().expand(2, 2)), "or [2, 2], contiguous and without"),
        (lambda: hard_topk(X, 4), "hard_topk: k=4 is not an integer in [0, 3]; give the number to keep"),
        (lambda: hard_topk(X, 1.5), "hard_topk: k=1.5 is not an integer in [0, 3]"),
        (lambda: hard_topk(X, math.nan), "hard_topk: k=nan is not a number"),
        (lambda: hard_topk(torch.tensor([math.nan]), 1), "hard_topk: scores hold NaN or infinity"),
        (lambda: hard_topk(X, 1, floor=0.5), "floor=0.5 but layer is missing; floor needs layer, [3] integers >= 0"),
        (lambda: hard_topk(X, 1, floor=2, layer=torch.zeros(3).long()), "floor=2 is outside [0, 1]; give a share"),
        (
            lambda: hard_topk(X, 1, floor=0.5, layer=torch.tensor([0, 1, 2])),
            "hard_topk: floor=0.5 keeps 3 blocks but k=1; lower floor or keep at least 3",
        ),
        (
            lambda: hard_topk(X, 3, floor=torch.tensor([3, 0]), layer=torch.tensor([0, 0, 1])),
            "hard_topk: floor asks for 3 blocks of layer 0, which has 2; lower it to at most that",
        ),
        (
            lambda: hard_topk(X, 3, floor=torch.tensor([1]), layer=torch.tensor([0, 0, 1])),
            "floor is int64 [1] on cpu; it must be one count >= 0 for each of the 2 layers",
        ),
        (
            lambda: hard_topk(X, 5, torch.tensor([4, 4, 4]), 1.0, torch.tensor([0, 0, 1])),
            "hard_topk: floor=1.0 costs 12 but k=5; lower floor or spend at least 12",
        ),
        (lambda: hard_topk(X, 5, torch.tensor([4.0, -4.0, 4.0])), "hard_topk: cost holds a negative number"),
        (lambda: hard_topk(X, -1, torch.ones(3)), "hard_topk: k=-1 is negative; give the cost that may be spent"),
    ],
)
def test_message(call: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(SmartpruneError, match=re.escape(text)):
        call()


def test_check_device_is_quiet_without_errors() -> None:
    check_device()


def test_costs_summed_in_float32_may_exceed_by_rounding() -> None:
    cost = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    k = float(cost.double().sum()) * (1 + 2e-7)
    assert float(soft_topk(make("means", 100_000), k, 0.1, cost).min()) == 1.0


# hard_topk.


def greedy(scores: list[float], limit: Fraction, cost: list[Fraction], forced: set[int]) -> set[int]:
    kept, room = set(forced), limit - sum(cost[i] for i in forced)
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if i not in kept and cost[i] <= room:
            kept.add(i)
            room -= cost[i]
    return kept


def best_per_layer(scores: list[float], layer: list[int], counts: list[int]) -> set[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return {i for a, n in enumerate(counts) for i in [j for j in order if layer[j] == a][:n]}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_hard_equals_greedy_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 14))
    scores = [float(v) for v in data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))]
    layer = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    floor = data.draw(st.sampled_from([None, 0.0, 0.02, 0.34, 0.5]))
    counts = [0, 0, 0] if floor is None else [math.ceil(Fraction(str(floor)) * layer.count(a)) for a in range(3)]
    forced = best_per_layer(scores, layer, counts)
    k = data.draw(st.integers(len(forced), n))
    x, layers = torch.tensor(scores), torch.tensor(layer)
    ones = [Fraction(1)] * n
    got = hard_topk(x, k, floor=floor, layer=layers)
    assert int(got.sum()) == k
    assert set(got.nonzero().flatten().tolist()) == greedy(scores, Fraction(k), ones, forced)

    price = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 100]), min_size=n, max_size=n))
    for unit in (1, Fraction(1, 4), Fraction(1, 10)):
        exact = [Fraction(float(p * unit)) for p in price]
        cost = torch.tensor(price) if unit == 1 else torch.tensor([float(p * unit) for p in price], dtype=torch.float64)
        limit = sum(exact[i] for i in forced) + data.draw(st.integers(0, 120)) * unit
        got = hard_topk(x, float(limit), cost, floor, layers)
        kept = set(got.nonzero().flatten().tolist())
        if unit != Fraction(1, 10):  # tenths are not exact in binary and are added in float64
            assert kept == greedy(scores, limit, exact, forced)
        spent = sum((exact[i] for i in kept), Fraction(0))
        assert spent <= limit + Fraction(1, 10**9)
        assert all(exact[i] > limit - spent - Fraction(1, 10**9) for i in range(n) if i not in kept)


def test_hard_is_the_best_subset() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 4, 8):
        x = torch.randn(n, generator=generator)
        for k in range(n + 1):
            best = max(combinations(range(n), k), key=lambda pick: sum(x[i].item() for i in pick), default=())
            assert set(hard_topk(x, k).nonzero().flatten().tolist()) == set(best)


def test_floor_is_exact_where_binary_is_not() -> None:
    assert 0.02 * 150 == 3.0
    assert 0.07 * 100 > 7  # the pitfall: ceil would give 8
    x, layer = torch.arange(200.0), torch.cat((torch.zeros(100), torch.ones(100))).long()
    assert int(hard_topk(x, 107, floor=0.07, layer=layer)[:100].sum()) == 7


def test_floor_counts() -> None:
    x, layer = torch.arange(6.0), torch.tensor([0, 0, 0, 1, 1, 1])
    assert hard_topk(x, 3, floor=torch.tensor([2, 0]), layer=layer).tolist() == [False, True, True, False, False, True]


def test_integer_costs_beyond_float64() -> None:
    big = 2**53
    cost = torch.tensor([big, 1, 1])
    assert hard_topk(X.flip(0), big + 1, cost).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hard_dtypes_ties_and_size(dtype: torch.dtype) -> None:
    x = make("means", 200_000).to(dtype)
    mask = hard_topk(x, 12_345)
    assert int(mask.sum()) == 12_345
    assert mask.dtype == torch.bool
    threshold = x[mask].min()
    assert bool((x[~mask] <= threshold).all())
    tied = (x == threshold).nonzero().flatten()
    assert bool((mask[tied].int().diff() <= 0).all())  # ties: the lower indices first


def test_hard_with_many_costs_is_fast_and_full() -> None:
    n = 100_000
    x, cost = make("means", n), (costs(n) % 1000).long() + 1
    limit = int(cost.sum()) // 5
    mask = hard_topk(x, limit, cost)
    left = limit - int(cost[mask].sum())
    assert 0 <= left < int(cost[~mask].min())


def test_a_floor_takes_cheaper_blocks_where_the_best_do_not_fit() -> None:
    """Against every choice there is: it fits whenever one does, keeps the floor, and leaves no room for another block."""
    rng = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (count,), generator=rng)

    fitted = 0
    for _ in range(400):
        sizes = draw(1, 4, int(draw(1, 3, 1)))
        layer = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        scores, cost = draw(0, 5, len(layer)).float(), draw(1, 5, len(layer))
        floor = torch.cat([draw(0, int(size), 1) for size in sizes])
        least = sum(int(cost[layer == i].sort().values[: int(n)].sum()) for i, n in enumerate(floor))
        limit = int(draw(0, int(cost.sum()), 1))
        if limit < least:
            with pytest.raises(SmartpruneError, match="costs"):
                hard_topk(scores, limit, cost, floor, layer)
            continue
        mask, fitted = hard_topk(scores, limit, cost, floor, layer), fitted + 1
        left = limit - int(cost[mask].sum())
        assert left >= 0
        assert all(int(mask[layer == i].sum()) >= int(n) for i, n in enumerate(floor))
        assert bool((cost[~mask] > left).all())
    assert fitted > 200


@pytest.mark.parametrize("k", [math.inf, -math.inf, 1.5])
def test_k_that_is_no_count(k: float) -> None:
    with pytest.raises(SmartpruneError, match="is not an integer in"):
        hard_topk(torch.ones(3), k)


def test_numbers_of_numpy_and_things_that_are_no_tensors() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0])
    assert hard_topk(scores, np.int64(2)).tolist() == [False, True, True]
    assert torch.equal(soft_topk(scores, np.float32(2), np.float32(0.5)), soft_topk(scores, 2.0, 0.5))
    layer = torch.tensor([0, 0, 1])
    for call, text in (
        (lambda: hard_topk([1.0, 2.0], 1), "scores is a list"),  # type: ignore[arg-type]
        (lambda: soft_topk([1.0, 2.0], 1, 0.1), "scores is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, [1, 1, 1]), "cost is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, None, 0.1, [0, 0, 1]), "layer is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, None, [1, 1], layer), r"floor=\[1, 1\] is outside"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, torch.tensor([1, 2])), "is not a number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SmartpruneError, match=text):
            call()


@pytest.mark.timeout(60)
def test_many_exchanges_take_no_time() -> None:
    """A floor that fits only if thousands of blocks give way to cheaper ones of their layer."""
    layers, n = 20, 3000
    generator = torch.Generator().manual_seed(0)
    cost = torch.tensor([25, 10, 4]).repeat(layers * n // 3)
    scores = cost.sqrt() + torch.rand(layers * n, generator=generator)
    layer = torch.arange(layers).repeat_interleave(n)
    limit = layers * 300 * 5
    mask = hard_topk(scores, limit, cost, 0.1, layer)
    assert (torch.bincount(layer[mask]) >= 300).all()
    assert limit - 4 < int(cost[mask].sum()) <= limit


@pytest.mark.parametrize(("n", "k"), [(300_001, 1.0), (300_001, 300_000.0), (2500, 1e-3), (2500, 1e-7)])
@pytest.mark.parametrize("tied", [False, True])
def test_plain_path_keeps_few_of_many_exactly(monkeypatch: pytest.MonkeyPatch, n: int, k: float, tied: bool) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = make("equal" if tied else "means", n).double()
    for tau in (10.0, 1e-3):
        assert float(soft_topk(x, k, tau).sum()) == pytest.approx(k, rel=1e-10)


def test_a_first_call_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation, say. What receives the codes of a device is made then, and a training writes to it later."""
    monkeypatch.setattr(device_errors, "device_flags", {})
    with torch.inference_mode():
        made = device_errors.device_flag(torch.device("cpu"))
    assert made is device_errors.device_flag(torch.device("cpu"))
    made[0].copy_(made[2].bitwise_or_(torch.tensor(1)))
    with pytest.raises(SmartpruneError, match="NaN or infinity"):
        check_device("cpu")
    assert not made[0].any()
    assert not made[2].any()


def test_a_share_as_floor_is_what_was_meant() -> None:
    """Five sixths of six are five, though the nearest binary number is a little more."""
    layer = torch.zeros(6, dtype=torch.long)
    assert int(hard_topk(torch.arange(6.0), 5, floor=5 / 6, layer=layer).sum()) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_all_costs_pays_for_all(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for n in (3, 10, 100, 5000):
        for _ in range(20):
            cost, scores = torch.rand(n, dtype=dtype, generator=draw), torch.rand(n, generator=draw)
            assert bool(hard_topk(scores, float(cost.sum()), cost).all())
            mask = hard_topk(scores, 0.999 * float(cost.sum()), cost)
            assert float(cost[mask].double().sum()) <= 0.999 * float(cost.sum())
            assert not bool(mask.all())


def test_costs_whose_sum_overflows() -> None:
    with pytest.raises(SmartpruneError, match=r"the costs add up to 9\.22e\+18, more than 2\*\*62; use a larger unit"):
        hard_topk(torch.tensor([1.0, 2.0]), 1, cost=torch.full((2,), 2**62))
