import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import reference, zoo
from helpers.usage import count_macs, count_uses
from smartprune.core import budget
from smartprune.core.block import Block
from smartprune.core.budget import ResolvedBudget, as_share, block_macs, blocks, keep_count, macs, min_keep, params
from smartprune.core.layers import find_layers
from smartprune.errors import SmartpruneError

SHARES = (
    "0",
    "0.1",
    "0.25",
    "0.3",
    "0.333",
    "0.5",
    "0.7",
    "0.9",
    "0.93",
    "0.95",
    "0.97",
    "0.98",
    "0.99",
    "0.995",
    "0.999",
)


def test_keep_is_an_exact_ceiling() -> None:
    for text in SHARES:
        for n in [*range(1, 400), 1000, 4227, 8364, 87_168, 174_336, 10**7, 10**9 + 7]:
            assert keep_count(as_share(float(text), "sparsity"), n) == reference.keep(text, n)


@given(st.integers(0, 99_999), st.integers(1, 10**8))
def test_keep_is_an_exact_ceiling_anywhere(hundred_thousandths: int, n: int) -> None:
    text = f"0.{hundred_thousandths:05}"
    kept = keep_count(as_share(float(text), "sparsity"), n)
    assert kept == reference.keep(text, n)
    assert 1 <= kept <= n


def test_shares_are_read_as_written() -> None:
    assert as_share(0.97, "x") == Fraction(97, 100)
    assert as_share(1 / 3, "x") == Fraction(1, 3)
    assert keep_count(as_share(0.4999999999, "x"), 10) == 6  # not rounded to a half
    assert keep_count(as_share(0.1999999999999, "x"), 45) == 37
    assert as_share(0.9999999999, "x") == Fraction(9999999999, 10**10)
    assert as_share(np.float32(0.9), "x") == Fraction(9, 10)
    assert as_share(Fraction(2, 7), "x") == Fraction(2, 7)
    assert as_share(np.float64(0.1), "x") == Fraction(1, 10)
    assert as_share(0, "x") == as_share(0.0, "x") == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (93, r"sparsity=93 is outside \[0, 1\): it is the share to remove; write sparsity=0.93"),
        (1, r"sparsity=1 is outside \[0, 1\)"),
        (1.0, r"outside \[0, 1\)"),
        (-0.1, r"outside \[0, 1\)"),
        (float("nan"), r"outside \[0, 1\)"),
        (float("inf"), r"outside \[0, 1\)"),
        (True, r"a bool, not a number in \[0, 1\)"),
        ("0.5", r"sparsity='0.5' is a str, not a number in \[0, 1\): it is the share to remove"),
        (None, r"a NoneType, not a number in \[0, 1\)"),
    ],
)
def test_wrong_shares(value: object, words: str) -> None:
    with pytest.raises(SmartpruneError, match=words):
        as_share(value, "sparsity")


def test_a_wrong_floor_has_its_own_message() -> None:
    layers, _ = find_layers(zoo.plain_cnn()[0], Block(4, 4))
    with pytest.raises(SmartpruneError, match=r"floor=2 .*least share of its blocks that each layer keeps"):
        min_keep(layers, 2)


def test_floor_rounds_up_in_every_layer() -> None:
    layers, _ = find_layers(zoo.plain_cnn()[0], Block(4, 4))
    for floor in ("0", "0.02", "0.1", "0.5", "0.999"):
        expected = [math.ceil(Fraction(floor) * layer.n) for layer in layers]
        assert min_keep(layers, float(floor)).tolist() == expected


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_block_macs_add_up_to_slow_counts(name: str) -> None:
    model, x = zoo.SMALL[name]()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    uses = count_uses(model, layers, x)
    for layer in layers:
        cost = block_macs(layer, uses[layer.name])
        assert cost.shape == (layer.n,)
        if len(uses[layer.name]) == 1:
            assert torch.equal(cost, layer.grid.sizes() * uses[layer.name][0])


def test_resolved_costs_and_limits() -> None:
    model, x = zoo.plain_cnn()
    layers, _ = find_layers(model, Block(4, 4))
    n = sum(layer.n for layer in layers)
    assert blocks(0.9).resolve(model, layers) == ResolvedBudget(None, reference.keep("0.9", n))
    resolved = params(0.9).resolve(model, layers)
    cost, limit = resolved.cost, resolved.limit
    assert cost is not None
    assert int(cost.sum()) == 16 * 20 * 9 + 20 * 12
    assert limit == math.floor(Fraction(1, 10) * int(cost.sum()))
    resolved = macs(0.5, x).resolve(model, layers)
    cost, limit = resolved.cost, resolved.limit
    assert cost is not None
    assert limit == int(cost.sum()) // 2
    fixed = count_macs(model, x) - int(cost.sum())
    limit = macs(0.5, x, of="model").resolve(model, layers).limit
    assert limit + fixed <= count_macs(model, x) / 2 < limit + fixed + 1


def test_budget_errors() -> None:
    model, x = zoo.plain_cnn()
    layers, _ = find_layers(model, Block(4, 4))
    with pytest.raises(SmartpruneError, match=r"macs\(0.99, of='model'\) cannot be met.*include="):
        macs(0.99, x, of="model").resolve(model, layers)
    with pytest.raises(SmartpruneError, match="an example input is needed"):
        macs(0.5, None).resolve(model, layers)
    with pytest.raises(SmartpruneError, match="the model does not run on it"):
        macs(0.5, torch.zeros(1, 5, 8, 8)).resolve(model, layers)
    with pytest.raises(SmartpruneError, match="example is a int"):
        macs(0.5, 3).resolve(model, layers)
    with pytest.raises(SmartpruneError, match="of='all'; it is 'layers'"):
        macs(0.5, x, of="all")  # type: ignore[arg-type]

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    idle = Idle()
    layers, _ = find_layers(idle, Block(4, 4))
    with pytest.raises(SmartpruneError, match="reaches none of the layers"):
        macs(0.5, x).resolve(idle, layers)
    assert budget.describe(budget.blocks(0.95)) == "blocks 0.95"


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=50, deadline=None)
def test_costs_of_ragged_blocks_add_up(out: int, into: int, rows: int, columns: int) -> None:
    model = nn.Sequential(nn.Linear(into, out), nn.Linear(out, 3))
    layers, _ = find_layers(model, Block(rows, columns), include="*")
    resolved = params(0.5).resolve(model, layers)
    cost, limit = resolved.cost, resolved.limit
    assert cost is not None
    assert int(cost.sum()) == into * out + 3 * out
    assert limit == (into * out + 3 * out) // 2
