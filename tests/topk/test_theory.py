"""Theorems about the operator, checked in float64 with slow, independent arithmetic."""

import math

import pytest
import torch
from torch import Tensor

from smartprune.topk import hard_topk, soft_topk


def scores(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def prices(n: int) -> Tensor:
    return 0.5 + 3 * torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def jacobian(x: Tensor, k: float, tau: float, cost: Tensor | None = None) -> Tensor:
    full: Tensor = torch.autograd.functional.jacobian(lambda s: soft_topk(s, k, tau, cost), x)
    return full


# Theorem 3.1: as tau -> 0 the operator becomes top-k; distinct scores, 1 <= k < N.


@pytest.mark.parametrize("k", [1, 7, 19])
def test_limit_is_hard_top_k(k: int) -> None:
    x = scores(20)
    gap = float(x.sort().values.diff().min())
    assert gap > 0
    hard = hard_topk(x, k).double()
    errors = [float((soft_topk(x, k, tau) - hard).abs().max()) for tau in (1.0, gap / 4, gap / 16, gap / 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 2 * 20 * math.exp(-2)
    assert errors[3] < 1e-12


def test_limit_is_shared_by_equal_scores() -> None:
    x = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    limit = torch.tensor([1, 1 / 3, 1 / 3, 1 / 3, 0], dtype=torch.float64)
    assert torch.allclose(soft_topk(x, 2, 1e-6), limit, atol=1e-9)


def test_monotone_and_invariant_under_shifts_but_not_scales() -> None:
    x = scores(30)
    mask = soft_topk(x, 8, 0.1)
    assert bool((mask[x.argsort()].diff() > 0).all())
    assert torch.allclose(soft_topk(x + 5, 8, 0.1), mask, atol=1e-9)
    assert torch.allclose(soft_topk(3 * x, 8, 0.3), mask, atol=1e-9)
    assert float((soft_topk(3 * x, 8, 0.1) - mask).abs().max()) > 0.1


# Proposition 3.2: J = (diag(v) - v v^T / sum(v)) / tau. Paper: Appendix B drops the norm in its last line.


@pytest.mark.parametrize("tau", [1.0, 0.2])
def test_jacobian(tau: float) -> None:
    x, k = scores(12), 4
    J = jacobian(x, k, tau)
    m = soft_topk(x, k, tau)
    v = m * (1 - m)
    assert torch.allclose(J, (torch.diag(v) - torch.outer(v, v) / v.sum()) / tau, atol=1e-9)
    assert float((J - (torch.diag(v) - torch.outer(v, v)) / tau).abs().max()) > 1e-3
    assert torch.allclose(J, J.T, atol=1e-12)
    assert float(J.sum(0).abs().max()) < 1e-9
    assert float(J.sum(1).abs().max()) < 1e-9
    step = 1e-6
    for j in range(12):
        ahead, behind = x.clone(), x.clone()
        ahead[j] += step
        behind[j] -= step
        difference = (soft_topk(ahead, k, tau) - soft_topk(behind, k, tau)) / (2 * step)
        assert torch.allclose(J[:, j], difference, atol=1e-6)


def test_jacobian_with_costs() -> None:
    x, c, tau = scores(12), prices(12), 0.3
    k = 0.4 * float(c.sum())
    J = jacobian(x, k, tau, c)
    m = soft_topk(x, k, tau, c)
    v = m * (1 - m)
    assert torch.allclose(J, (torch.diag(v) - torch.outer(v, c * v) / (c * v).sum()) / tau, atol=1e-9)
    assert float((c @ J).abs().max()) < 1e-9  # the cost of the mask is constant
    assert float(J.sum(1).abs().max()) < 1e-9  # a common shift changes nothing
    assert float((J - J.T).abs().max()) > 1e-3  # with costs it is no longer symmetric


def test_gradient_through_an_ill_conditioned_jacobian_is_a_contraction_of_tau() -> None:
    x, g = scores(50), scores(50, 1)
    for tau in (1.0, 1e-2, 1e-4):
        leaf = x.clone().requires_grad_()
        soft_topk(leaf, 10, tau).backward(g)
        assert leaf.grad is not None
        assert float(leaf.grad.abs().max()) <= float((g.max() - g.min()) / (4 * tau)) * (1 + 1e-9)


# Theorem 3.5 (the direction that holds): a stationary masked weight is stationary in w and in m.


def test_stationary_masked_weights_are_stationary() -> None:
    w = scores(24).requires_grad_()
    m = scores(24, 1).requires_grad_()
    goal = (w * soft_topk(m, 6, 0.2)).detach()
    ((w * soft_topk(m, 6, 0.2) - goal) ** 2).sum().backward()
    assert w.grad is not None
    assert m.grad is not None
    assert float(w.grad.abs().max()) < 1e-12
    assert float(m.grad.abs().max()) < 1e-12


# Proposition 3.6: the relative change |hard w - f w| / |f w| when the mask is made hard. Paper: prints the smaller of
# 1 and |1 - 1/f| for all; it is 1 for pruned and |1 - 1/f| for kept blocks, so the printed value is a lower bound.


@pytest.mark.parametrize("tau", [0.5, 0.1, 0.02])
def test_relative_jump_at_hardening(tau: float) -> None:
    x, k = scores(15), 5
    f, hard = soft_topk(x, k, tau), hard_topk(x, k)
    jump = (hard.double() - f).abs() / f
    assert torch.allclose(jump[~hard], torch.ones(10, dtype=torch.float64))
    assert torch.allclose(jump[hard], (1 - 1 / f[hard]).abs())
    assert bool((jump >= torch.minimum(torch.ones_like(f), (1 - 1 / f).abs()) - 1e-12).all())


@pytest.mark.parametrize("k", [1, 4])
def test_a_dropped_block_is_at_most_k_over_k_plus_1(k: int) -> None:
    x = torch.cat((torch.zeros(k + 1, dtype=torch.float64), torch.full((5,), -9.0, dtype=torch.float64)))
    x[:k] += 1e-9
    f = soft_topk(x, k, 0.01)
    assert float(f[k]) == pytest.approx(k / (k + 1), abs=1e-6)
    for seed in range(20):
        y = scores(9, seed)
        assert float(soft_topk(y, k, 0.7)[~hard_topk(y, k)].max()) <= k / (k + 1) + 1e-12


# Plain gradient descent.


@pytest.mark.parametrize("weighted", [False, True])
def test_descent_conserves_the_sum_of_scores(weighted: bool) -> None:
    x, w = scores(20).requires_grad_(), scores(20, 1)
    cost = prices(20) if weighted else None
    limit = 6.0 if cost is None else 0.3 * float(cost.sum())
    start = x.detach().clone()
    optimizer = torch.optim.SGD([x], lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        (soft_topk(x, limit, 0.3, cost) * w).square().sum().backward()
        optimizer.step()
    # dx = v / tau (g - c mean): sum(dx) = (sum(v g) - sum(c v) mean) / tau = 0, with the mean weighted by c v
    assert float((x.detach() - start).abs().max()) > 1e-3
    assert float((x.detach() - start).sum().abs()) < 1e-10


def test_with_costs_the_sum_is_conserved_and_the_weighted_sum_is_not() -> None:
    x, c, g = scores(20).requires_grad_(), prices(20), scores(20, 2)
    soft_topk(x, 0.3 * float(c.sum()), 0.3, c).backward(g)
    assert x.grad is not None
    assert float(x.grad.sum().abs()) < 1e-10
    assert float((c * x.grad).sum().abs()) > 1e-3


# Batch norm: the loss does not change when an output channel's masked weights are multiplied by a number, so that its derivative
# along the mask is 0 in every row of blocks.


def row_sums(normalised: bool, keep: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over each row of blocks, for two convolutions in blocks of 4x2: of mask * dL/dmask, of dL/dscore, and of |dL/dscore|."""
    draw = torch.Generator().manual_seed(4)
    weights = [torch.randn(16, inputs, 3, 3, dtype=torch.float64, generator=draw) for inputs in (8, 16)]
    last, x = (torch.randn(shape, dtype=torch.float64, generator=draw) for shape in ((5, 16), (16, 8, 6, 6)))
    m = scores(4 * 4 + 4 * 8, 2).requires_grad_()
    mask = soft_topk(m, keep * m.numel(), 3.0)
    mask.retain_grad()
    for weight, part in zip(weights, mask.split((16, 32)), strict=True):
        spread = part.view(4, -1).repeat_interleave(4, 0).repeat_interleave(2, 1)
        x = torch.nn.functional.conv2d(x, weight * spread[:, :, None, None])
        x = torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-30) if normalised else x)
    torch.nn.functional.cross_entropy(x.mean((2, 3)) @ last.T, torch.arange(16) % 5).backward()
    assert mask.grad is not None
    assert m.grad is not None

    def rows(values: Tensor) -> Tensor:
        return torch.cat([part.view(4, -1).sum(1) for part in values.split((16, 32))])

    return rows(mask.detach() * mask.grad), rows(m.grad), rows(m.grad.abs())


def test_score_gradients_sum_to_zero_per_row_before_a_batch_norm() -> None:
    along, total, size = row_sums(True, 0.03)
    assert float(along.abs().max()) < 1e-12
    assert float((total.abs() / size).max()) < 0.1  # mask * (1 - mask) is nearly the mask where few blocks are kept
    along, total, size = row_sums(False, 0.03)
    assert float(along.abs().max()) > 1e-6
    assert float((total.abs() / size).max()) > 0.3


# Relatives.


def sinkhorn(x: Tensor, k: float, epsilon: float, rounds: int) -> Tensor:
    """The mass on anchor 1 in entropic transport of N points to the anchors 0 and 1 with squared cost."""
    n = x.numel()
    cost = torch.stack((x**2, (x - 1) ** 2), dim=1)
    log_rows = torch.full((n,), -math.log(n), dtype=x.dtype)
    log_columns = torch.tensor([(n - k) / n, k / n], dtype=x.dtype).log()
    f, g = torch.zeros(n, dtype=x.dtype), torch.zeros(2, dtype=x.dtype)
    for _ in range(rounds):
        f = epsilon * (log_rows - torch.logsumexp((g[None] - cost) / epsilon, dim=1))
        g = epsilon * (log_columns - torch.logsumexp((f[:, None] - cost) / epsilon, dim=0))
    return n * ((f[:, None] + g[None] - cost) / epsilon).exp()[:, 1]


@pytest.mark.parametrize(("tau", "rounds"), [(1.0, 200), (0.25, 3000)])
def test_equals_entropic_transport_at_epsilon_two_tau(tau: float, rounds: int) -> None:
    x = scores(40)
    assert torch.allclose(sinkhorn(x, 13, 2 * tau, rounds), soft_topk(x, 13, tau), atol=1e-8)


def objective(x: Tensor, p: Tensor, tau: float) -> Tensor:
    entropy = -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p))
    return (x * p + tau * entropy).sum()


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_maximizes_linear_plus_entropy(tau: float) -> None:
    x, k = scores(16), 5
    p = soft_topk(x, k, tau)
    best = objective(x, p, tau)
    generator = torch.Generator().manual_seed(4)
    for size in (0.9, 0.3):
        for _ in range(50):
            d = torch.randn(16, dtype=torch.float64, generator=generator)
            d = d - d.mean()  # stays on sum(p) = k
            q = p + size * d * float((torch.minimum(p, 1 - p) / d.abs()).min())
            assert float(objective(x, q, tau)) < float(best)
    # stationarity: x - tau logit(p) is the same multiplier for every block, and it is theta
    multiplier = x - tau * torch.special.logit(p)
    assert float(multiplier.max() - multiplier.min()) < 1e-9
    warm = torch.full((2,), math.nan, dtype=torch.float64)
    soft_topk(x, k, tau, warm=warm)
    assert float(multiplier[0]) == pytest.approx(float(warm.sum()), abs=1e-9)


def test_costs_enter_the_variational_form_as_weights_of_the_entropy_and_gain() -> None:
    x, c, tau = scores(16), prices(16), 0.4
    k = 0.35 * float(c.sum())
    p = soft_topk(x, k, tau, c)
    best = (c * (x * p + tau * -(torch.special.xlogy(p, p) + torch.special.xlogy(1 - p, 1 - p)))).sum()
    generator = torch.Generator().manual_seed(4)
    for _ in range(100):
        d = torch.randn(16, dtype=torch.float64, generator=generator)
        d = d - c * (c @ d) / (c @ c)  # stays on sum(c p) = k
        q = p + 0.3 * d * float((torch.minimum(p, 1 - p) / d.abs()).min())
        other = (c * (x * q + tau * -(torch.special.xlogy(q, q) + torch.special.xlogy(1 - q, 1 - q)))).sum()
        assert float(other) < float(best)
