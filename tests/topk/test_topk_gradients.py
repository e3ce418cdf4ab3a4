"""Gradients of soft_topk: compared with finite differences and with the formula, in every precision, and what raises."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.scores import bisect, make_costs, make_scores
from smartprune import topk
from smartprune.errors import SmartpruneError
from smartprune.topk import soft_topk

X = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tau", [1.0, 0.05])
def test_gradient_equals_finite_differences(tau: float, weighted: bool) -> None:
    x = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    cost = torch.tensor([1.0, 0.0, 5.0, 2.0, 1.0, 0.5, 3.0, 1.0, 7.0], dtype=torch.float64) if weighted else None
    torch.autograd.gradcheck(lambda s: soft_topk(s, 3.3, tau, cost), (x,), eps=1e-7, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_second_derivative_raises(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x = make_scores("means", 50).requires_grad_()
    plain, tracked = (
        torch.autograd.grad(soft_topk(x, 10, 1e-2).square().sum(), x, create_graph=create)[0] for create in (False, True)
    )
    assert torch.equal(plain, tracked)
    with pytest.raises(SmartpruneError, match="got a second derivative"):
        tracked.sum().backward()


@pytest.mark.parametrize("call", ["backward", "grad", "hessian"])
def test_second_derivative_raises_for_a_loss_linear_in_the_mask(call: str) -> None:
    """The incoming gradient does not depend on the scores then, so autograd could take the second derivative for zero."""
    x = make_scores("means", 50).requires_grad_()
    (first,) = torch.autograd.grad(soft_topk(x, 10, 1e-2)[0], x, create_graph=True)
    calls: dict[str, Callable[[], object]] = {
        "backward": lambda: (first.square().sum() + x.sum()).backward(),
        "grad": lambda: torch.autograd.grad(first.square().sum(), x),
        "hessian": lambda: torch.autograd.functional.hessian(lambda scores: soft_topk(scores, 10, 1e-2)[0], x.detach()),
    }
    with pytest.raises(SmartpruneError, match="got a second derivative"):
        calls[call]()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_costs_modified_before_backward_raise(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    dtype = torch.float64 if backend == "torch" else torch.float32  # the solver uses costs of this dtype without a copy
    x, cost = make_scores("means", 50).to(dtype).requires_grad_(), torch.full((50,), 2.0, dtype=dtype)
    mask = soft_topk(x, 20.0, 1e-2, cost)
    cost[0] = 100
    with pytest.raises(SmartpruneError, match="cost was modified in place"):
        mask[0].backward()
    copied = soft_topk(x, 20.0, 1e-2, cost.int())  # the solver uses a copy
    cost[0] = 2
    copied[0].backward()


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_mask_has_the_same_bits_without_gradient(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x, cost = make_scores("means", 1000), make_costs(1000)
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
    x = make_scores(kind, n)
    cost = make_costs(n).clamp(max=100.0) if weighted else None
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
def test_gradient_is_zero_across_huge_gaps(gap: float) -> None:
    x = torch.tensor([gap, gap, 0.0, 0.0], requires_grad=True)
    mask = soft_topk(x, 2, 1e-7)
    mask.backward(torch.tensor([1.0, -2.0, 3.0, 4.0]))
    assert mask.tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)
    assert x.grad is not None
    assert x.grad.tolist() == [0.0] * 4


def test_equal_scores_share_the_mask_with_finite_gradients() -> None:
    x = torch.tensor([1e4, 1e4, 1e4, 0.0], requires_grad=True)
    mask = soft_topk(x, 2, 1e-7)
    mask[0].backward()
    assert mask.tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0], abs=1e-5)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([2 / 9 * 2 / 3 * 1e7, -2 / 27 * 1e7, -2 / 27 * 1e7, 0], rel=1e-4)


@pytest.mark.parametrize("warm", [None, (1e30, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e16, -3e29])
def test_equal_scores_of_any_size_share_the_mask(size: float, dtype: torch.dtype, warm: tuple[float, float] | None) -> None:
    """Every mask is k over the sum of the costs, even if tau is below the rounding error of the scores."""
    cost = torch.tensor([1.0, 2.0, 4.0, 9.0, 16.0])
    for k in (0.001, 3.0, 31.5):
        start = None if warm is None else torch.tensor(warm, dtype=torch.float64)
        mask = soft_topk(torch.full((5,), size, dtype=dtype), k, 1e-4, cost, warm=start)
        assert mask.tolist() == pytest.approx([k / 32] * 5, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_float16_gradient_is_clamped(compiled: bool) -> None:
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
def test_half_precision_scores_compute_in_float32(dtype: torch.dtype) -> None:
    x = make_scores("means", 5000).to(dtype).requires_grad_()
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


def test_backward_through_two_slices_of_the_mask() -> None:
    x = make_scores("means", 100).requires_grad_()
    mask = soft_topk(x, 10, 1e-2)
    parts = [mask[:50] * 1.0, mask[50:] * 1.0]
    for part in parts:  # backward of soft_topk runs once per part
        part.sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) < 1e-4  # the sum of the mask is constant


def test_gradients_under_activation_checkpointing() -> None:
    grads = []
    for reentrant in (True, False, None):
        x, w = make_scores("means", 64).requires_grad_(), torch.randn(64, generator=torch.Generator().manual_seed(1))
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


def test_scores_modified_before_backward_raise() -> None:
    x = make_scores("means", 100).requires_grad_()
    mask = soft_topk(x, 10, 1e-2)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(SmartpruneError, match=r"modified in place between forward and backward.*after backward\(\)"):
        mask.sum().backward()
