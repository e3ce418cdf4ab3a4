"""The measurement of times for a budget: masks, networks in turns, and curves that agree with whole networks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.latency_tables import X, net, table_of
from smartprune import SmartpruneError
from smartprune.core.layers import Layer
from smartprune.runtime import latency_measure
from smartprune.runtime.latency_measure import _fit, _largest, _like_budgets, _totals, measure_latency
from smartprune.runtime.latency_time import NetworkTime


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_measure, "SECONDS", 0.0)
    monkeypatch.setattr(latency_measure, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(latency_measure, "TURN", 0)


@dataclass
class Drifting:
    """A network on a machine that slows down by 5 % in every round."""

    ns: float
    totals: list[float] = field(default_factory=list)

    def time(self) -> None:
        self.totals.append(self.ns * 1.05 ** len(self.totals))


def test_a_machine_that_slows_down_does_not_change_the_shares(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_measure, "LEAST_ROUNDS", 9)
    networks: Any = [Drifting(1000), Drifting(420), Drifting(60)]
    dense, *others = _totals(networks)
    assert dense == pytest.approx(1000 * 1000 * 1.05**4)  # the median of nine rounds, in picoseconds
    assert [other / dense for other in others] == pytest.approx([0.42, 0.06], rel=1e-5)


def wide() -> nn.Module:
    """Layers of very different size, with trained-looking weights: every output channel has its own scale."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(a, b, 3) for a, b in ((3, 16), (16, 16), (16, 64), (64, 64), (64, 8))))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(torch.empty(len(layer.weight), 1, 1, 1).log_normal_(0, 0.5))
    return model


def squares_of(model: nn.Module, layers: tuple[Layer, ...]) -> list[Tensor]:
    return [layer.grid.sum(model.get_parameter(layer.weight).detach().double().square()) for layer in layers]


@pytest.mark.parametrize("extra", [0, 40])
def test_weights_that_slow_the_other_layers_down_are_found(extra: int) -> None:
    """The true time is the sum over the layers and ``extra`` for every kept weight. Masks that were not measured are predicted."""
    model = wide()
    layers = sp.plan(model, (4, 4), sparsity=0.5, include="*").layers
    table = table_of(layers)
    curves = [table.layers[layer.weight] for layer in layers]
    squares = squares_of(model, layers)

    def truth(mask: list[Tensor]) -> int:
        kept = [float(layer.grid.sizes()[m].sum()) for layer, m in zip(layers, mask, strict=True)]
        times = [np.interp(x, c.x, c.ps) + extra * x for x, c in zip(kept, curves, strict=True)]
        return round(10**6 + 1.2 * sum(times))

    ends = [[_largest(rank, share) for rank in squares] for share in (1.0, 0.0)]
    masks: Any = [*ends, *(mask for pair in _like_budgets(layers, curves, squares) for mask in pair)]
    fitted, network = _fit(layers, curves, masks, [truth(mask) for mask in masks])
    sizes = tuple(layer.grid.sizes() for layer in layers)
    time_of = NetworkTime(sizes, tuple(fitted), network, 0)
    assert network.ps[-1] == truth(ends[0])
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        shares = torch.rand(len(layers), generator=generator)
        mask = [_largest(torch.rand(layer.n, generator=generator), float(s)) for layer, s in zip(layers, shares, strict=True)]
        assert time_of.of(torch.cat(mask)) == pytest.approx(truth(mask), rel=0.02)


def test_masks_of_budgets_take_the_same_sum_with_many_and_with_few_weights() -> None:
    model = wide()
    layers = sp.plan(model, (4, 4), sparsity=0.5, include="*").layers
    sizes = [layer.grid.sizes() for layer in layers]
    curves = [latency_measure.Curve((0, layer.params), (0, 10**8)) for layer in layers]  # every layer takes the same time
    for by_time, by_mean in _like_budgets(layers, curves, squares_of(model, layers)):
        counts = [sum(int(size[m].sum()) for size, m in zip(sizes, mask, strict=True)) for mask in (by_time, by_mean)]
        assert counts[0] > counts[1]


def test_the_largest_blocks_are_kept_and_ties_are_spread() -> None:
    rank = torch.tensor([3.0, 1.0, 5.0, 4.0])
    assert _largest(rank, 0.5).tolist() == [False, False, True, True]
    assert (int(_largest(rank, 0).sum()), int(_largest(rank, 1).sum())) == (0, 4)
    kept = _largest(torch.ones(100), 0.3)
    assert int(kept.sum()) == 30
    assert not kept[:30].all()


class Rows(nn.Module):
    """torch.fx cannot trace it, because it counts the samples; torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(x[i : i + 1]) for i in range(x.shape[0])])


def test_a_network_that_only_export_traces_is_refused(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_measure, "SHARES", (0.0, 1.0))
    model = Rows()
    layers = sp.plan(model, (4, 4), sparsity=0.5, include="*").layers
    with pytest.raises(
        SmartpruneError, match=r"no layer to prune gets faster .* only torch.export can trace the model; use a budget"
    ):
        measure_latency(model, layers, X, 1)


class Unsteady(nn.Module):
    """Neither tracer can trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if float(x.sum()) >= 0 else self.net(-x)


def test_a_network_that_cannot_be_traced_is_refused(quick: None) -> None:
    model = Unsteady()
    layers = sp.plan(model, (4, 4), sparsity=0.5).layers
    with pytest.raises(SmartpruneError, match="latency: the runtime cannot trace the model; use a budget in MACs"):
        measure_latency(model, layers, X, 1)
