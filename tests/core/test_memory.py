"""Addresses of tensors, and tensors that have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.odd_tensors import FREED, WITHOUT_MEMORY, WithoutClass, freed
from smartprune.core.block import Block
from smartprune.core.memory import NoMemoryError, address_of, overlaps
from smartprune.core.occupancy import occupied


def test_the_address_of_an_ordinary_tensor() -> None:
    x = torch.randn(2, 4, 6)
    views = [
        x,
        nn.Parameter(x),
        x[1],
        x.transpose(0, 2),
        x[:, ::2, 1:],
        x.as_subclass(WithoutClass),
        torch.randn(1, 3).expand(5, 3),
    ]
    for view in views:
        assert address_of(view, "test") == view.data_ptr() != 0
    with torch.inference_mode():
        assert address_of(torch.ones(3), "test") != 0
    assert address_of(torch.empty(0, 3), "test") == 0


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensors_without_memory_have_no_address(kind: str) -> None:
    with pytest.raises(NoMemoryError, match=r"test: a \w+ of shape \(2, 3\) has no memory"):
        address_of(WITHOUT_MEMORY[kind](torch.randn(2, 3)), "test")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch.func.jvp
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_tensors_inside_a_function_transform_have_no_address(transform: object) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(NoMemoryError):
            address_of(x, "test")
        return x * 2

    transform(function)(torch.randn(2, 3))  # type: ignore[operator]


@pytest.mark.parametrize("kind", FREED)
def test_freed_memory_is_an_error(kind: str) -> None:
    x = FREED[kind](torch.randn(4, 6))
    with pytest.raises(sp.SmartpruneError, match=r"test: a tensor of shape \(4, 6\) has only .* bytes of memory left") as error:
        address_of(x, "test")
    assert not isinstance(error.value, NoMemoryError)
    with pytest.raises(sp.SmartpruneError, match="the weight: a tensor of shape"):
        occupied(Block(2, 2).grid((4, 6)), x)


def test_sparse_tensors_have_no_address() -> None:
    with pytest.raises(NoMemoryError):
        address_of(torch.eye(3).to_sparse(), "test")


@pytest.mark.parametrize("what", ["plan", "attach", "hard_topk", "soft_topk"])
def test_freed_weights_and_scores_are_an_error(what: str) -> None:
    """torch reads freed memory without a check, and the process ends."""
    model, scores = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.rand(64)
    freed(model[1].weight.data)
    freed(scores)
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: sp.plan(model, (4, 4), 0.5),
        "attach": lambda: sp.attach(model, "smart", block=(4, 4), sparsity=0.5, steps=3),
        "hard_topk": lambda: sp.hard_topk(scores, 5),
        "soft_topk": lambda: sp.soft_topk(scores, 5, 0.1),
    }
    with pytest.raises(sp.SmartpruneError, match="has only 0 bytes of memory left"):
        calls[what]()


def test_tensors_that_share_numbers_are_found() -> None:
    x = torch.randn(8, 8)
    assert list(overlaps([x, torch.randn(8, 8), x.t()])) == [(0, 2)]
    assert list(overlaps([x[:4], x[4:], x[:, ::2], x[3]])) == [(0, 2), (0, 3), (1, 2), (2, 3)]
    assert list(overlaps([x[:, ::2], x[:, 1::2], x[5, 2:4]])) == [(0, 2), (1, 2)]  # the first two are interleaved
    assert list(overlaps([torch.randn(1, 3).expand(5, 3)])) == [(0, 0)]
    assert list(overlaps([x, x.view(torch.int32)])) == [(0, 1)]
    assert list(overlaps([x, x.view(torch.bfloat16)])) == [(0, 1)]
    assert list(overlaps([x[:0], x, torch.randn(8, 8, device="meta"), x.to_sparse()])) == []
