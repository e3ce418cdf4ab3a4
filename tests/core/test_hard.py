"""hard_topk, compared with slow loops and with every subset."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.scores import make_costs, make_scores
from smartprune.core.hard import hard_topk
from smartprune.errors import SmartpruneError

X = torch.tensor([1.0, 2.0, 3.0])


def greedy(scores: list[float], limit: Fraction, cost: list[Fraction], forced: set[int]) -> set[int]:
    kept, room = set(forced), limit - sum(cost[i] for i in forced)
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if i not in kept and cost[i] <= room:
            kept.add(i)
            room -= cost[i]
    return kept


def best_per_layer(scores: list[float], layer: list[int], counts: list[int]) -> set[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return {i for a, n in enumerate(counts) for i in [j for j in order if layer[j] == a][:n]}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_equals_a_greedy_loop(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 14))
    scores = [float(v) for v in data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))]
    layer = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    floor = data.draw(st.sampled_from([None, 0.0, 0.02, 0.34, 0.5]))
    counts = [0, 0, 0] if floor is None else [math.ceil(Fraction(str(floor)) * layer.count(a)) for a in range(3)]
    forced = best_per_layer(scores, layer, counts)
    k = data.draw(st.integers(len(forced), n))
    x, layers = torch.tensor(scores), torch.tensor(layer)
    ones = [Fraction(1)] * n
    got = hard_topk(x, k, floor=floor, layer=layers)
    assert int(got.sum()) == k
    assert set(got.nonzero().flatten().tolist()) == greedy(scores, Fraction(k), ones, forced)

    price = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 100]), min_size=n, max_size=n))
    for unit in (1, Fraction(1, 4), Fraction(1, 10)):
        exact = [Fraction(float(p * unit)) for p in price]
        cost = torch.tensor(price) if unit == 1 else torch.tensor([float(p * unit) for p in price], dtype=torch.float64)
        limit = sum(exact[i] for i in forced) + data.draw(st.integers(0, 120)) * unit
        got = hard_topk(x, float(limit), cost, floor, layers)
        kept = set(got.nonzero().flatten().tolist())
        if unit != Fraction(1, 10):  # tenths are not exact in binary and are added in float64
            assert kept == greedy(scores, limit, exact, forced)
        spent = sum((exact[i] for i in kept), Fraction(0))
        assert spent <= limit + Fraction(1, 10**9)
        assert all(exact[i] > limit - spent - Fraction(1, 10**9) for i in range(n) if i not in kept)


def test_keeps_the_best_subset() -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 4, 8):
        x = torch.randn(n, generator=generator)
        for k in range(n + 1):
            best = max(combinations(range(n), k), key=lambda pick: sum(x[i].item() for i in pick), default=())
            assert set(hard_topk(x, k).nonzero().flatten().tolist()) == set(best)


def test_floor_share_is_rounded_in_exact_arithmetic() -> None:
    assert 0.02 * 150 == 3.0
    assert 0.07 * 100 > 7  # so ceil would give 8
    x, layer = torch.arange(200.0), torch.cat((torch.zeros(100), torch.ones(100))).long()
    assert int(hard_topk(x, 107, floor=0.07, layer=layer)[:100].sum()) == 7


def test_floor_share_is_read_as_a_short_fraction() -> None:
    """Five sixths of six are five, although the nearest binary number is a little larger."""
    layer = torch.zeros(6, dtype=torch.long)
    assert int(hard_topk(torch.arange(6.0), 5, floor=5 / 6, layer=layer).sum()) == 5


def test_floor_may_be_counts_per_layer() -> None:
    x, layer = torch.arange(6.0), torch.tensor([0, 0, 0, 1, 1, 1])
    assert hard_topk(x, 3, floor=torch.tensor([2, 0]), layer=layer).tolist() == [False, True, True, False, False, True]


def test_integer_costs_above_2_to_53_are_exact() -> None:
    big = 2**53
    cost = torch.tensor([big, 1, 1])
    assert hard_topk(X.flip(0), big + 1, cost).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ties_go_to_the_lower_index(dtype: torch.dtype) -> None:
    x = make_scores("means", 200_000).to(dtype)
    mask = hard_topk(x, 12_345)
    assert int(mask.sum()) == 12_345
    assert mask.dtype == torch.bool
    threshold = x[mask].min()
    assert bool((x[~mask] <= threshold).all())
    tied = (x == threshold).nonzero().flatten()
    assert bool((mask[tied].int().diff() <= 0).all())  # lower indices first


def test_many_costs_leave_no_room_for_another_block() -> None:
    n = 100_000
    x, cost = make_scores("means", n), (make_costs(n) % 1000).long() + 1
    limit = int(cost.sum()) // 5
    mask = hard_topk(x, limit, cost)
    left = limit - int(cost[mask].sum())
    assert 0 <= left < int(cost[~mask].min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_all_costs_keeps_all(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for n in (3, 10, 100, 5000):
        for _ in range(20):
            cost, scores = torch.rand(n, dtype=dtype, generator=draw), torch.rand(n, generator=draw)
            assert bool(hard_topk(scores, float(cost.sum()), cost).all())
            mask = hard_topk(scores, 0.999 * float(cost.sum()), cost)
            assert float(cost[mask].double().sum()) <= 0.999 * float(cost.sum())
            assert not bool(mask.all())


def test_floor_exchanges_blocks_for_cheaper_ones_to_fit() -> None:
    """It fits whenever some choice fits, keeps the floor, and leaves no room for another block."""
    rng = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (count,), generator=rng)

    fitted = 0
    for _ in range(400):
        sizes = draw(1, 4, int(draw(1, 3, 1)))
        layer = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        scores, cost = draw(0, 5, len(layer)).float(), draw(1, 5, len(layer))
        floor = torch.cat([draw(0, int(size), 1) for size in sizes])
        least = sum(int(cost[layer == i].sort().values[: int(n)].sum()) for i, n in enumerate(floor))
        limit = int(draw(0, int(cost.sum()), 1))
        if limit < least:
            with pytest.raises(SmartpruneError, match="costs"):
                hard_topk(scores, limit, cost, floor, layer)
            continue
        mask, fitted = hard_topk(scores, limit, cost, floor, layer), fitted + 1
        left = limit - int(cost[mask].sum())
        assert left >= 0
        assert all(int(mask[layer == i].sum()) >= int(n) for i, n in enumerate(floor))
        assert bool((cost[~mask] > left).all())
    assert fitted > 200


@pytest.mark.timeout(60)
def test_thousands_of_exchanges_are_fast() -> None:
    """The floor fits only if thousands of blocks are exchanged for cheaper ones of their layer."""
    layers, n = 20, 3000
    generator = torch.Generator().manual_seed(0)
    cost = torch.tensor([25, 10, 4]).repeat(layers * n // 3)
    scores = cost.sqrt() + torch.rand(layers * n, generator=generator)
    layer = torch.arange(layers).repeat_interleave(n)
    limit = layers * 300 * 5
    mask = hard_topk(scores, limit, cost, 0.1, layer)
    assert (torch.bincount(layer[mask]) >= 300).all()
    assert limit - 4 < int(cost[mask].sum()) <= limit


@pytest.mark.parametrize("k", [math.inf, -math.inf, 1.5])
def test_k_that_is_not_a_count_raises(k: float) -> None:
    with pytest.raises(SmartpruneError, match="is not an integer in"):
        hard_topk(torch.ones(3), k)


def test_costs_whose_sum_overflows_raise() -> None:
    with pytest.raises(SmartpruneError, match=r"the costs add up to 9\.22e\+18, more than 2\*\*62; use a larger unit"):
        hard_topk(torch.tensor([1.0, 2.0]), 1, cost=torch.full((2,), 2**62))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: hard_topk(X, 4), "hard_topk: k=4 is not an integer in [0, 3]; give the number to keep"),
        (lambda: hard_topk(X, 1.5), "hard_topk: k=1.5 is not an integer in [0, 3]"),
        (lambda: hard_topk(X, math.nan), "hard_topk: k=nan is not a number"),
        (lambda: hard_topk(torch.tensor([math.nan]), 1), "hard_topk: scores hold NaN or infinity"),
        (lambda: hard_topk(X, 1, floor=0.5), "floor=0.5 but layer is missing; floor needs layer, [3] integers >= 0"),
        (lambda: hard_topk(X, 1, floor=2, layer=torch.zeros(3).long()), "floor=2 is outside [0, 1]; give a share"),
        (
            lambda: hard_topk(X, 1, floor=0.5, layer=torch.tensor([0, 1, 2])),
            "hard_topk: floor=0.5 keeps 3 blocks but k=1; lower floor or keep at least 3",
        ),
        (
            lambda: hard_topk(X, 3, floor=torch.tensor([3, 0]), layer=torch.tensor([0, 0, 1])),
            "hard_topk: floor asks for 3 blocks of layer 0, which has 2; lower it to at most that",
        ),
        (
            lambda: hard_topk(X, 3, floor=torch.tensor([1]), layer=torch.tensor([0, 0, 1])),
            "floor is int64 [1] on cpu; it must be one count >= 0 for each of the 2 layers",
        ),
        (
            lambda: hard_topk(X, 5, torch.tensor([4, 4, 4]), 1.0, torch.tensor([0, 0, 1])),
            "hard_topk: floor=1.0 costs 12 but k=5; lower floor or spend at least 12",
        ),
        (lambda: hard_topk(X, 5, torch.tensor([4.0, -4.0, 4.0])), "hard_topk: cost holds a negative number"),
        (lambda: hard_topk(X, -1, torch.ones(3)), "hard_topk: k=-1 is negative; give the cost that may be spent"),
    ],
)
def test_error_messages(call: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(SmartpruneError, match=re.escape(text)):
        call()


def test_numbers_of_numpy_are_accepted() -> None:
    assert hard_topk(torch.tensor([1.0, 3.0, 2.0]), np.int64(2)).tolist() == [False, True, True]


def test_arguments_that_are_not_tensors_raise() -> None:
    scores, layer = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 1])
    for call, text in (
        (lambda: hard_topk([1.0, 2.0], 1), "scores is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, [1, 1, 1]), "cost is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, None, 0.1, [0, 0, 1]), "layer is a list"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, 1, None, [1, 1], layer), r"floor=\[1, 1\] is outside"),  # type: ignore[arg-type]
        (lambda: hard_topk(scores, torch.tensor([1, 2])), "is not a number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SmartpruneError, match=text):
            call()
