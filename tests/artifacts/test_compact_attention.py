"""Heads and widths of attention that are empty."""

from __future__ import annotations

import pytest
import torch

import smartprune as sp
from helpers.compact_parts import Net
from helpers.compact_shape_nets import attention

HEAD = [4, 5, 6, 7]  # the second of three
WIDTHS = [1, 5, 9]  # the second entry of every head


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("views", "empty", "left"),
    [("widths", HEAD, 8), ("heads", WIDTHS, 9), ("widths", WIDTHS, 12), ("heads", HEAD, 12), ("both", HEAD, 12)],
)
def test_what_the_code_does_not_state_is_removed(views: str, empty: list[int], left: int, fused: bool) -> None:
    """Values are constant in a head or in one entry of every head; for the latter, keys are zero, too."""
    torch.manual_seed(0)
    model, x = attention(views, fused)
    model = model.eval()
    with torch.no_grad():
        model.v.weight[empty] = 0
        if empty == WIDTHS:
            model.k.weight[empty] = 0
            model.k.bias[empty] = 0
    small = sp.compact(model, x)
    assert [tuple(getattr(small, name).weight.shape) for name in "qkv"] == [(left, 12)] * 3
    assert tuple(small.o.weight.shape) == (12, left)
    y = torch.randn(5, 7, 5)
    torch.testing.assert_close(small(y), model(y), rtol=1e-5, atol=1e-5)
    report = sp.compaction(small)
    assert bool(report.stated) == (left == 12)
    assert all("compact_shape_nets.py" in line for line in report.stated)


def test_a_head_is_needed_as_long_as_one_value_varies() -> None:
    torch.manual_seed(0)
    model, x = attention()
    with torch.no_grad():
        model.v.weight[HEAD[1:]] = 0
    assert not sp.compaction(sp.compact(model.eval(), x)).changed


def test_without_a_stated_scale_the_width_of_queries_stays() -> None:
    """The default scale of scaled_dot_product_attention is that of the width."""
    torch.manual_seed(0)

    def forward(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out: torch.Tensor = m.o(y.transpose(1, 2).flatten(2))
        return out

    model = Net(forward, **{name: torch.nn.Linear(12, 12) for name in "qkvo"}).eval()
    with torch.no_grad():
        for name in "kv":
            getattr(model, name).weight[WIDTHS] = 0
            getattr(model, name).bias[WIDTHS] = 0
    x = torch.randn(2, 6, 12)
    small = sp.compact(model, x)
    assert [getattr(small, name).out_features for name in "qkv"] == [12, 12, 9]
    torch.testing.assert_close(small(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("boolean", "left"), [(True, 12), (False, 8)])
def test_a_constant_value_stays_where_a_position_may_attend_to_nothing(boolean: bool, left: int) -> None:
    """The result is zero there, and not the constant. A mask of numbers always leaves something."""
    torch.manual_seed(0)

    def forward(m: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
        out: torch.Tensor = m.o(y.transpose(1, 2).flatten(2))
        return out

    model = Net(forward, **{name: torch.nn.Linear(12, 12) for name in "qkvo"}).eval()
    with torch.no_grad():
        model.v.weight[HEAD] = 0
    keep = torch.ones(7, 7, dtype=torch.bool)
    keep[2] = not boolean
    mask = keep if boolean else keep.float().log()
    x = torch.randn(2, 7, 12)
    small = sp.compact(model, (x, mask))
    assert small.v.out_features == left
    torch.testing.assert_close(small(x, mask), model(x, mask), rtol=1e-5, atol=1e-5)
