"""Reusable backward passes against plain autograd."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from smartprune.errors import SmartpruneError
from smartprune.pruning.autograd import reusable_backward


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a * b, 0).cumsum(0)


def test_value_and_gradients_are_those_of_plain_autograd() -> None:
    a, b = inputs()
    out = reusable_backward(lambda: compute(a, b), [a, b])
    expected = compute(a, b)
    assert torch.equal(out, expected)
    grad = torch.arange(6, dtype=torch.float64)
    for got, value in zip(torch.autograd.grad(out, [a, b], grad), torch.autograd.grad(expected, [a, b], grad), strict=True):
        assert torch.equal(got, value)


def test_a_second_backward_pass_adds_the_same_gradients() -> None:
    a, b = inputs()
    out = reusable_backward(lambda: compute(a, b), [a, b])
    first, second = (torch.autograd.grad((out * factor).sum(), [a, b]) for factor in (1.0, 2.0))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(2 * one, two)


def test_a_source_that_is_not_used_gets_no_gradient() -> None:
    a, b = inputs()
    out = reusable_backward(lambda: a.exp(), [a, b])
    assert torch.autograd.grad(out.sum(), [a, b], allow_unused=True)[1] is None


def test_second_derivatives_raise() -> None:
    a, b = inputs()
    out = reusable_backward(lambda: compute(a, b), [a, b])
    with pytest.raises(SmartpruneError, match="got a second derivative with respect to masked weights"):
        torch.autograd.grad(out.square().sum(), a, create_graph=True)[0].sum().backward()


def test_nothing_is_kept_without_gradients() -> None:
    a, b = inputs()
    with torch.no_grad():
        assert reusable_backward(lambda: compute(a, b), [a, b]).grad_fn is None
    assert reusable_backward(lambda: compute(a.detach(), b.detach()), [a.detach()]).grad_fn is None


def test_the_graph_is_freed_with_its_result() -> None:
    a, b = inputs()
    kept: list[weakref.ref[torch.Tensor]] = []

    def traced() -> torch.Tensor:
        result = (a * b).exp()  # exp saves its own result
        kept.append(weakref.ref(result))
        return result

    out = reusable_backward(traced, [a, b])
    assert kept[0]() is not None
    gc.disable()
    try:
        del out
        assert kept[0]() is None
    finally:
        gc.enable()
