"""Models that torch.fx cannot trace are traced with torch.export."""

from __future__ import annotations

import collections
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.module import MOST_EXPORTS, Accelerated
from smartprune.runtime.trace.exported import export

Point = collections.namedtuple("Point", "x y")


class OnShapes(nn.Module):
    """Branches on a shape, as most models of transformers do, and runs ``body``."""

    def __init__(self, body: Callable[[OnShapes, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.linear, self.bilinear = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
        self.in_out = nn.Parameter(torch.randn(8, 8))
        self.body = body
        self.register_buffer("offset", torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] > 100:
            x = x[:100]
        return self.body(self, x)


BODIES: dict[str, Callable[[OnShapes, Tensor], Any]] = {
    "convolution": lambda m, x: F.silu(m.norm(m.conv(x))) + x,
    "in_place": lambda m, x: F.relu_(m.conv(x)).add_(1.5).mul_(m.offset),
    "silu_in_place": lambda m, x: F.silu(m.conv(x), inplace=True) * 2,
    "pooling": lambda m, x: F.avg_pool2d(F.max_pool2d(m.conv(x), 3, 1, 1), 2, ceil_mode=True),
    "pooling_without_stride": lambda m, x: F.avg_pool2d(F.max_pool2d(m.conv(x), 2), 2),
    "nearest": lambda m, x: F.interpolate(m.conv(x), scale_factor=2.0),
    "bilinear": lambda m, x: F.interpolate(m.conv(x), size=(9, 7), mode="bilinear", align_corners=True),
    "head": lambda m, x: m.linear(torch.flatten(F.adaptive_avg_pool2d(m.conv(x), 1), 1)),
    "rows": lambda m, x: F.gelu(m.linear(x.flatten(2).transpose(1, 2))).clamp(-1, 1),
    "tanh_gelu": lambda m, x: F.gelu(m.linear(x.mean((2, 3))), approximate="tanh"),
    "conv1d": lambda m, x: torch.addmm(m.linear.bias, x.mean((2, 3)), m.in_out),
    "two_scaled": lambda m, x: torch.add(m.conv(x), m.pointwise(x), alpha=0.5),
    "concatenation": lambda m, x: torch.cat([m.conv(x), m.pointwise(x)], 1).chunk(2, 1)[1],
    "other_weights": lambda m, x: m.bilinear(x.mean((2, 3)), F.linear(x.mean((2, 3)), m.in_out + 1)),
    "nested": lambda m, x: {"a": [m.conv(x)], "b": Point(m.pointwise(x), None), "n": 3},
    "same_twice": lambda m, x: [(y := m.conv(x)), y, x],
    "shapes": lambda m, x: m.conv(x) * (torch.arange(x.shape[-1]) > 2) / x.shape[0],
    "dropout": lambda m, x: F.dropout(F.hardswish(m.conv(x)), 0.5, m.training),
    "stores": lambda m, x: setattr(m, "seen", x) or m.conv(x),
}


def make(name: str) -> nn.Module:
    model = randomly_pruned(OnShapes(BODIES[name]), 0.4, (4, 4)).eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2)
    return model


@pytest.mark.parametrize("name", BODIES)
def test_exported_graphs_compute_what_the_model_computes(name: str) -> None:
    model, x = make(name), torch.randn(2, 8, 6, 6)
    attributes = set(vars(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = sp.accelerate(model, threads=1, example=x)
    assert set(vars(model)) == attributes
    for value in (x, torch.randn_like(x)):
        expected, result = model(value), fast(value)
        assert type(result) is type(expected)
        (leaves, structure), (expected_leaves, expected_structure) = tree_flatten(result), tree_flatten(expected)
        assert structure == expected_structure
        for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
            if isinstance(expected_leaf, Tensor):
                assert_equal_to_rounding(leaf, expected_leaf)
            else:
                assert leaf == expected_leaf
    assert isinstance(fast, Accelerated)
    assert fast.plan(x).programs
    assert "traced by torch.export" in repr(fast)


@pytest.mark.parametrize(
    ("first", "norm", "shape"),
    [
        (nn.Linear(8, 8), nn.BatchNorm1d(8), (4, 8)),
        (nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), (4, 8, 6)),
        (nn.Conv3d(8, 8, 3), nn.BatchNorm3d(8), (2, 8, 4, 4, 4)),
    ],
)
def test_batch_norms_of_all_sizes_are_exported(first: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
    model = OnShapes(lambda m, x: m.last(m.first(x)).relu())
    model.first, model.last = first, norm
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    x = torch.randn(shape)
    fast = sp.accelerate(model.eval(), example=x, backend="native")
    assert "traced by torch.export" in repr(fast)
    with torch.no_grad():
        assert_equal_to_rounding(fast(x), model(x))


def test_layers_become_modules_and_fuse() -> None:
    """One program holds the convolution with its batch norm, activation and addition."""
    fast = sp.accelerate(make("convolution"), threads=1, example=torch.randn(2, 8, 6, 6))
    (program,) = fast.plan(torch.randn(2, 8, 6, 6)).programs  # type: ignore[operator]
    assert len(program.outputs) == 1


def test_the_graph_shares_the_weights_of_the_model() -> None:
    model = make("head")
    graph, spec = export(model, ((torch.randn(2, 8, 6, 6),), {}))
    stored = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in graph.parameters()} <= stored
    assert spec is None
    assert not graph.training


def test_a_few_shapes_are_exported_and_all_others_run_the_models_own_code() -> None:
    model = make("convolution")
    fast = sp.accelerate(model, threads=1, example=torch.randn(1, 8, 6, 6))
    assert isinstance(fast, Accelerated)
    for size in range(1, MOST_EXPORTS + 3):
        x = torch.randn(size, 8, 6, 6)
        assert_equal_to_rounding(fast(x), model(x))
        if size <= MOST_EXPORTS:
            assert fast.plan(x).programs
    assert fast.replaced_model() is not None
    assert "own code with replaced layers" in repr(fast)


def test_int8_uses_the_exported_graph() -> None:
    model, x = make("convolution"), torch.randn(2, 8, 6, 6)
    fast, expected = sp.accelerate(model, threads=1, example=x, dtype="int8"), model(x).detach()
    assert float((fast(x) - expected).abs().max()) < 0.1 * float(expected.abs().max())


def test_attributes_and_methods_of_the_model_remain() -> None:
    model = make("convolution")
    model.config = {"name": "x"}
    fast: Any = sp.accelerate(model, threads=1, example=torch.randn(2, 8, 6, 6))
    assert fast.config == {"name": "x"}
    assert fast.linear.out_features == 8
    with pytest.raises(AttributeError, match="colour"):
        _ = fast.colour


def test_log_levels_are_restored() -> None:
    before = logging.root.manager.disable
    sp.accelerate(make("head"), threads=1, example=torch.randn(2, 8, 6, 6))
    assert logging.root.manager.disable == before
