"""Values with three axes: maps of layers for sequences, and images without a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from smartprune.runtime.module import Accelerated

SEQUENCE = (4, 8, 20)
COLUMN = (4, 8, 20, 1)


class Network(nn.Module):
    """A function of its input and of layers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def sequences() -> nn.Conv1d:
    return nn.Conv1d(8, 8, 3, padding=1)


def images() -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1)


def between(size: tuple[int, ...]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.last(m.first(x).reshape(size))


# The rows of a column of pixels become the columns of a map with one row.
COLUMNS = {
    "squeeze": (Network(lambda m, x: m.last(m.first(x).squeeze(3)), first=images(), last=sequences()), COLUMN),
    "to a sequence": (Network(between(SEQUENCE), first=images(), last=sequences()), COLUMN),
    "to a column": (Network(between(COLUMN), first=sequences(), last=images()), SEQUENCE),
}
# These layers read a value with three axes as one image of four channels with 8 x 20 pixels.
WITHOUT_BATCH = {
    "max pool": (Network(lambda m, x: m.last(m.first(x)), first=sequences(), last=nn.MaxPool2d(3, 1, 1)), SEQUENCE),
    "max_pool2d": (Network(lambda m, x: F.max_pool2d(m.first(x), 2), first=sequences()), SEQUENCE),
    "avg_pool2d": (Network(lambda m, x: F.avg_pool2d(m.first(x), (2, 2)), first=sequences()), SEQUENCE),
    "adaptive average pool": (Network(lambda m, x: F.adaptive_avg_pool2d(m.first(x), (4, 5)), first=sequences()), SEQUENCE),
    "adaptive max pool": (Network(lambda m, x: F.adaptive_max_pool2d(m.first(x), (4, 5)), first=sequences()), SEQUENCE),
    "convolution": (Network(lambda m, x: m.last(m.first(x).relu()), first=sequences(), last=nn.Conv2d(4, 4, 3, 1, 1)), SEQUENCE),
}
CASES = COLUMNS | WITHOUT_BATCH
TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "int8": 0.1}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_sequences_and_images_in_one_network_agree_with_torch(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    model, shape = CASES[name]
    x = torch.randn(shape)
    backend = "native" if dtype == "float32" else "auto"  # never the model itself, whatever is faster
    fast = sp.accelerate(model.eval(), example=x, dtype=dtype, backend=backend)
    assert isinstance(fast, Accelerated)
    fast.plan(x)  # there is one
    assert "torch.export" not in repr(fast)  # torch.fx already gave the right result
    expected = copy.deepcopy(model).double()(x.double())
    assert (fast(x) - expected).abs().max() < TOLERANCES[dtype] * expected.abs().max()


@torch.no_grad()
def test_removing_the_only_row_of_a_map_leaves_one_program() -> None:
    x = torch.randn(2, 8, 1, 20)
    model = Network(lambda m, x: m.last(m.first(x).squeeze(2)), first=images(), last=sequences()).eval()
    fast = sp.accelerate(model, example=x, backend="native")
    assert isinstance(fast, Accelerated)
    assert len(fast.plan(x).parts) == 1
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
