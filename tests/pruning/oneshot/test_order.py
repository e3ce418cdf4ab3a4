"""The order of removal, compared with least squares on every subset of tiny layers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from smartprune.core.block import Block
from smartprune.core.layers import Layer
from smartprune.pruning.oneshot import order
from smartprune.pruning.oneshot.matrix import Tiles
from smartprune.pruning.oneshot.order import cholesky, removal_costs

ALL = 10**6  # rounds: one block at a time


def tiles_of(rows: int, columns: int, block: tuple[int, int], parts: int = 1) -> Tiles:
    grid = Block(*block).grid((rows * parts, columns), parts)
    return Tiles.of(Layer("a", "Linear", grid, 0, False, (("a", "weight"),)))


def loss(weight: Tensor, x: Tensor, kept: list[int], row_weights: Tensor, damping: float) -> float:
    """The smallest weighted error of the outputs with these columns, by numpy's least squares."""
    inputs = x.double().numpy()
    root = np.sqrt(damping * np.mean(np.diag(inputs.T @ inputs / len(inputs))))
    dense = weight.double().numpy().T
    penalty = root * np.sqrt(len(inputs)) * np.eye(inputs.shape[1])
    stacked = np.vstack([inputs, penalty])  # the damping is the error of the weights themselves
    goal = stacked @ dense
    rest = goal - (stacked[:, kept] @ np.linalg.lstsq(stacked[:, kept], goal, rcond=None)[0] if kept else 0)
    return float((np.square(rest).sum(0) * row_weights.double().numpy()).sum() / len(inputs))


@pytest.mark.parametrize("block", [(4, 2), (2, 2), (3, 3), (1, 1), (4, 7), (1, 7)])
def test_costs_are_those_of_greedy_removal_by_least_squares(block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, x, row_weights = torch.randn(4, 7), torch.randn(50, 7) @ torch.randn(7, 7), torch.rand(4) + 0.1
    tiles = tiles_of(4, 7, block)
    costs = removal_costs(weight[None], (x.T @ x / 50)[None].double(), row_weights[None], tiles, 0.01, rounds=ALL)
    for r, rows in enumerate(tiles.rows):
        rows = rows[rows >= 0]
        kept, before, expected, highest = list(range(len(tiles.columns))), 0.0, {}, 0.0
        while kept:
            after = {}
            for group in kept:
                columns = torch.cat([tiles.columns[i] for i in kept if i != group] or [torch.empty(0, dtype=torch.long)])
                after[group] = loss(weight[rows], x, columns[columns >= 0].tolist(), row_weights[rows], 0.01)
            best = min(after, key=lambda group: after[group])
            highest = max(highest, after[best] - before)
            expected[best], before = highest, after[best]
            kept.remove(best)
        result = costs[tiles.index[0, r]]
        assert result.tolist() == pytest.approx([expected[i] for i in range(len(expected))], rel=1e-3)


def test_greedy_removal_is_close_to_the_best_subset() -> None:
    torch.manual_seed(1)
    weight, x, ones = torch.randn(3, 8), torch.randn(60, 8) @ torch.randn(8, 8), torch.ones(3)
    tiles = tiles_of(3, 8, (3, 1))
    costs = removal_costs(weight[None], (x.T @ x / 60)[None].double(), ones[None], tiles, 1e-4, rounds=ALL)
    best = min(loss(weight, x, list(kept), ones, 1e-4) for kept in combinations(range(8), 4))
    result = loss(weight, x, sorted(costs.argsort()[4:].tolist()), ones, 1e-4)
    assert result <= 1.5 * best
    smallest = loss(weight, x, sorted(weight.norm(dim=0).argsort()[4:].tolist()), ones, 1e-4)
    assert result < smallest


def test_rounds_of_several_blocks_have_the_exact_total() -> None:
    """Costs in one round are sequential, so that the total over all blocks is what removing everything costs."""
    torch.manual_seed(0)
    weight, x = torch.randn(2, 4, 12), torch.randn(80, 12)
    tiles, moment = tiles_of(4, 12, (4, 1), parts=2), (x.T @ x / 80)[None].double()
    everything = (weight.double() @ moment * weight).sum((1, 2)) + 1e-3 * moment.diagonal(
        dim1=1, dim2=2
    ).mean() * weight.square().sum((1, 2))
    for rounds in (2, 4, ALL):
        costs = removal_costs(weight, moment, torch.ones(2, 4), tiles, 1e-3, rounds=rounds)
        assert (costs[tiles.index[:, 0]].sum(1) >= everything - 1e-3).all()  # costs do not decrease, so at least
        assert costs[tiles.index[:, 0]].sum(1).allclose(everything, rtol=0.15)


def test_little_memory_gives_the_same_costs() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(1, 12, 10), torch.randn(40, 10)
    args = weight, (x.T @ x / 40)[None].double(), torch.ones(1, 12), tiles_of(12, 10, (4, 2))
    assert torch.allclose(removal_costs(*args), removal_costs(*args, memory=1), rtol=1e-4)


def test_layers_with_many_inputs_are_ordered_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of one piece are ordered as those of a layer of their own, damped by their own mean."""
    torch.manual_seed(0)
    weight, x, ones = torch.randn(2, 6, 11), torch.randn(2, 60, 11) @ torch.randn(11, 11), torch.rand(2, 6)
    moment, tiles = (x.mT @ x / 60).double(), tiles_of(6, 11, (3, 2), parts=2)
    monkeypatch.setattr(order, "MOST_INPUTS", 4)
    costs = removal_costs(weight, moment, ones, tiles)[tiles.index]
    for first, groups in ((0, 2), (2, 2), (4, 2)):
        columns = slice(2 * first, min(11, 2 * first + 4))
        monkeypatch.setattr(order, "MOST_INPUTS", 10**6)
        inputs = columns.stop - columns.start
        alone = tiles_of(6, inputs, (3, 2), parts=2)
        expected = removal_costs(weight[..., columns], moment[:, columns, columns], ones, alone)[alone.index]
        assert torch.allclose(costs[..., first : first + groups], expected, rtol=1e-5)


@pytest.mark.parametrize(("groups", "size", "expected"), [(4, 3, 4), (6, 2, 3), (7, 2, 4), (2, 5, 2), (1, 9, 1)])
def test_pieces_hold_at_most_the_inputs_that_are_allowed(
    groups: int, size: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MOST_INPUTS", 4)
    sizes, padded = [], order._padded

    def note(moment: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        sizes.append(columns.numel())
        return padded(moment, columns)

    monkeypatch.setattr(order, "_padded", note)
    inputs = groups * size
    removal_costs(torch.ones(1, 2, inputs), torch.eye(inputs).double()[None], torch.ones(1, 2), tiles_of(2, inputs, (2, size)))
    assert len(sizes) == expected
    assert max(sizes) <= max(4, size)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_costs_of_very_large_and_small_numbers_are_in_proportion(scale: float) -> None:
    torch.manual_seed(0)
    weight, x, tiles = torch.randn(1, 4, 6), torch.randn(40, 6), tiles_of(4, 6, (2, 2))
    moment, ones = (x.T @ x / 40)[None].double(), torch.ones(1, 4)
    expected = removal_costs(weight, moment, ones, tiles)
    assert torch.allclose(removal_costs(scale * weight, moment, ones, tiles) / scale**2, expected, rtol=1e-5)
    assert torch.allclose(removal_costs(weight, scale * moment, ones, tiles) / scale, expected, rtol=1e-5)


def test_inputs_that_are_always_zero_cost_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    x[:, 2] = 0
    weight = torch.randn(1, 4, 6)
    costs = removal_costs(weight, (x.T @ x / 40)[None].double(), torch.ones(1, 4), tiles_of(4, 6, (4, 1)), 1e-6)
    assert costs.argmin() == 2
    assert costs[2] < 1e-4 * costs.max()


def test_an_indefinite_matrix_gets_a_larger_diagonal() -> None:
    matrix = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[4.0, 0.0], [0.0, 9.0]]])
    factors = cholesky(matrix)
    assert factors.isfinite().all()
    assert torch.equal(factors[1], torch.diag(torch.tensor([2.0, 3.0])))
