"""Comparing two results: what counts as equal, and what raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from smartprune.runtime.check import ResultMismatch, compare, random_like

A = torch.tensor([1.0, -4.0, 2.0])


@pytest.mark.parametrize(
    "result",
    [A.clone(), A + 3.9e-3, {"a": A.clone(), "n": 3}, [A.clone(), None], (A, math.nan)],
    ids=["equal", "rounded", "nested", "with None", "with NaN"],
)
def test_results_that_agree(result: Any) -> None:
    expected = A if isinstance(result, torch.Tensor) else result
    compare(result, expected, 1e-3)


@pytest.mark.parametrize(
    ("result", "expected", "error"),
    [
        (A + 4.1e-3, A, 4.1e-3),
        (A.double(), A, math.inf),
        (A[:2], A, math.inf),
        ([A, A], [A], math.inf),
        ({"n": 3}, {"n": 4}, math.inf),
        ({"n": 3}, {"n": 3.0}, math.inf),
        (None, A, math.inf),
        (torch.full((3,), math.nan), A, math.nan),
    ],
    ids=["error", "dtype", "shape", "number of tensors", "number", "type of a number", "no tensor", "NaN"],
)
def test_results_that_differ_raise(result: Any, expected: Any, error: float) -> None:
    with pytest.raises(ResultMismatch) as caught:
        compare(result, expected, 1e-3)
    assert caught.value.error == pytest.approx(error, rel=1e-3, nan_ok=True)


def test_results_with_infinity_are_not_compared() -> None:
    compare(A, torch.tensor([1.0, math.inf, 2.0]), 1e-3)


def test_random_inputs_have_the_shapes_and_sizes_of_the_example() -> None:
    state = torch.get_rng_state()
    leaves = [300 * torch.ones(4, 500), torch.arange(3), 7, torch.zeros(2, 2)]
    out = random_like(leaves)
    assert out is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert out[0].shape == (4, 500)
    assert float(out[0].std()) == pytest.approx(100, rel=0.05)
    assert torch.equal(out[1], leaves[1])
    assert out[2] == 7
    assert float(out[3].abs().max()) > 0
    assert random_like([torch.arange(3), 7]) is None
