"""The memory that operations point to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

import smartprune as sp
from smartprune.runtime.cpu import emit
from smartprune.runtime.module import Accelerated


def weight_addresses(model: nn.Module, x: torch.Tensor) -> tuple[list[int], list[Any]]:
    fast = sp.accelerate(model.eval(), example=x, threads=1, backend="native")
    assert isinstance(fast, Accelerated)
    (program,) = fast.plan(x).programs
    operations = [operation for operation in program._compiled.operations if operation.weight]
    return [operation.weight for operation in operations], program._compiled.arrays


def test_weights_lie_side_by_side_in_one_array() -> None:
    """Small arrays from all over the memory would make the time of a network depend on where they lie."""
    layers = [nn.Conv2d(32, 32, 3, padding=1) for _ in range(6)]
    with torch.no_grad():
        layers[2].weight.zero_()  # nothing is stored, and the next weight still has its own address
    addresses, arrays = weight_addresses(nn.Sequential(*layers), torch.randn(1, 32, 8, 8))
    (whole,) = [array for array in arrays if array.nbytes == emit.CHUNK]
    steps = [b - a for a, b in pairwise(addresses)]
    assert all(whole.ctypes.data <= address < whole.ctypes.data + whole.nbytes for address in addresses)
    assert all(address % emit.ALIGN == 0 for address in addresses)
    size = 32 * 32 * 9 * 4
    assert [size <= step < size + 2 * emit.ALIGN for step in steps] == [True, True, False, True, True]
    assert steps[2] == emit.ALIGN


def test_weights_that_fill_an_array_get_another_one(monkeypatch: Any) -> None:
    size = 32 * 32 * 9 * 4
    monkeypatch.setattr(emit, "CHUNK", 3 * size)
    model = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(5)), nn.Conv2d(32, 96, 3, padding=1))
    x = torch.randn(1, 32, 8, 8)
    addresses, arrays = weight_addresses(model, x)
    assert len(set(addresses)) == len(addresses)
    assert sum(array.nbytes == 3 * size for array in arrays) == 3  # two weights each, and the large one is on its own
    with torch.no_grad():
        assert torch.allclose(sp.accelerate(model, example=x, backend="native")(x), model(x), atol=1e-4)
