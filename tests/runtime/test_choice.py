"""Choosing the faster way. The clock is replaced, so no test depends on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime import choice
from smartprune.runtime.choice import Timing
from smartprune.runtime.module import Accelerated

real_time_both = choice.__dict__["time_both"]  # before the fixture of all tests replaces it


class Branches(nn.Module):
    """No tracer follows its code, because it branches on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if float(x.detach().sum()) > 0 else -x)


class Parts(nn.Module):
    """Two compiled parts, and an operation without a kernel between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cumsum(self.first(x).relu_(), 1))


class Clock:
    """Counts the calls of both ways, and says in turn which one is faster."""

    def __init__(self, *torch_is_faster: bool) -> None:
        self.answers = list(torch_is_faster)

    def __call__(self, kernels: Callable[[], Any], torch: Callable[[], Any]) -> Timing:
        for way in (kernels, torch):
            way()
            way()
        return Timing(2.0, 1.0) if self.answers.pop(0) else Timing(1.0, 2.0)


def accelerated(model: nn.Module, monkeypatch: pytest.MonkeyPatch, *torch_is_faster: bool, **options: Any) -> nn.Module:
    clock = Clock(*torch_is_faster)
    monkeypatch.setattr(choice, "time_both", clock)
    x = torch.randn(3, 16)
    fast = sp.accelerate(model, threads=1, example=x, **options)
    assert clock.answers == []
    assert_equal_to_rounding(fast(x), model(x))
    return fast


def test_torch_runs_the_model_if_it_is_faster_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomly_pruned(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3, (4, 4))
    fast = accelerated(model, monkeypatch, True)
    assert "torch runs the model, because it is faster for these inputs: 1e+03 ms, and 2e+03 ms with the kernels" in repr(fast)
    x = torch.randn(3, 16)
    assert torch.equal(fast(x), model(x))  # the model's own bits


def test_the_kernels_run_without_a_note_if_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = accelerated(randomly_pruned(nn.Linear(16, 16), 0.3, (4, 4)), monkeypatch, False)
    assert isinstance(fast, Accelerated)
    assert fast.plan(torch.randn(3, 16)).programs
    assert "faster" not in repr(fast)


def test_each_part_is_chosen_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part is slower with kernels. Its nodes include an operation that changes a value in place."""
    model = randomly_pruned(Parts(), 0.3, (4, 4))
    fast = accelerated(model, monkeypatch, True, False, False)
    assert isinstance(fast, Accelerated)
    plan = fast.plan(torch.randn(3, 16))
    assert len(plan.programs) == 1
    assert "torch runs 1 of 2 parts, because it is faster there" in repr(fast)


@pytest.mark.parametrize("faster", [True, False])
def test_replaced_layers_are_used_only_if_they_are_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomly_pruned(Branches(), 0.3, (4, 4))
    fast = accelerated(model, monkeypatch, False, False, not faster)  # two layers, then all of them
    assert ("own code with replaced layers" in repr(fast)) == faster
    assert ("because it is faster" in repr(fast)) != faster


@pytest.mark.parametrize("options", [{"backend": "native"}, {"dtype": "int8"}, {"backend": "reference"}], ids=str)
def test_other_settings_are_not_timed(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def time_both(kernels: object, torch: object) -> Timing:
        raise AssertionError("timed")

    monkeypatch.setattr(choice, "time_both", time_both)
    x = torch.randn(3, 16)
    assert sp.accelerate(nn.Linear(16, 16), threads=1, example=x, **options)(x).shape == (3, 16)


def test_both_ways_take_turns_and_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    seconds = {"kernels": [9.0, 0.03, 0.02, 0.04], "torch": [9.0, 0.05, 0.06, 0.03]}

    def way(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            now[0] += seconds[name].pop(0)

        return run

    timing = real_time_both(way("kernels"), way("torch"))
    assert order == ["kernels", "torch"] * 4
    assert (timing.kernels, timing.torch) == (pytest.approx(0.02), pytest.approx(0.03))
    assert not timing.torch_is_faster
