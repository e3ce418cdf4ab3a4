"""The solver of plain tensor operations, compared with the CPU solver."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.device_syncs import DeviceSyncs
from helpers.scores import TEMPERATURES, make_costs, make_scores, no_start
from smartprune import topk
from smartprune.errors import SmartpruneError
from smartprune.topk import eager, soft_topk


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
def test_agrees_with_the_cpu_solver(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 500
    x, cost = make_scores(kind, n), make_costs(n) if weighted else None
    g = torch.randn(n, generator=torch.Generator().manual_seed(5))
    total = float(n if cost is None else cost.double().sum())
    for tau in TEMPERATURES:
        for share in (1 / n, 0.3, 1 - 1 / n):
            k, results = share * total, []
            for backend in ("auto", "torch"):
                monkeypatch.setattr(topk, "BACKEND", backend)
                leaf, warm = x.clone().requires_grad_(), no_start()
                mask = soft_topk(leaf, k, tau, cost, warm=warm)
                again = soft_topk(leaf, k, tau, cost, warm=warm)
                assert float((mask - again).detach().abs().max()) < 3e-4
                mask.backward(g)
                results.append((mask.detach(), leaf.grad))
            got = float((results[1][0].double() * (1 if cost is None else cost)).sum())
            assert abs(got / k - 1) < 1e-5
            assert float((results[0][0] - results[1][0]).abs().max()) < 3e-4
            scale = float(results[0][1].abs().max()) + 1e-2 / tau
            assert float((results[0][1] - results[1][1]).abs().max()) < 2e-3 * scale


def extreme_scores(kind: str, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x, u = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
    return {
        "cauchy": torch.tan(math.pi * (u - 0.5)),
        "two clouds": x * 1e-3 + (u < 0.5),
        "twelve decades": 10 ** (12 * u - 8),
        "one far above": torch.cat((x[1:] * 1e-3, torch.tensor([1e4]))),
        "one far below": torch.cat((x[1:] * 1e-3, torch.tensor([-1e4]))),
        "two values": (u < 0.3).float(),
        "clusters": (3 * x).round() + 1e-4 * u,
    }[kind]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["cauchy", "two clouds", "twelve decades", "one far above", "one far below", "two values", "clusters"],
)
def test_agrees_with_the_cpu_solver_on_extreme_scores(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (2, 17, 1000):
        x, cost = extreme_scores(kind, n), make_costs(n) if weighted else None
        total = float(n if cost is None else cost.double().sum())
        wide = None if cost is None else cost.double()
        for tau in (1e2, *TEMPERATURES):
            for share in (1 / n, 0.1, 0.500001, 0.77, 1 - 1 / n):
                monkeypatch.setattr(topk, "BACKEND", "auto")
                expected = soft_topk(x.double(), share * total, tau, wide)
                monkeypatch.setattr(topk, "BACKEND", "torch")
                for scores, c, most in ((x, cost, 1e-6), (x.double(), wide, 1e-10)):
                    got = soft_topk(scores, share * total, tau, c).double()
                    assert abs(float((got if wide is None else got * wide).sum()) / (share * total) - 1) < most
                    assert float((got - expected).abs().max()) < 3e-6, (n, tau, share)


@pytest.mark.parametrize("n", [100_000, 1_000_000])
def test_sum_is_exact_for_many_scores(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    for kind in ("means", "near one"):
        x = make_scores(kind, n)
        for tau in (10.0, 1e-3, 1e-7):
            for k in (1, n // 10, n - 1):
                assert abs(float(soft_topk(x, k, tau).double().sum()) / k - 1) < 1e-6


@pytest.mark.parametrize(("n", "k"), [(300_001, 1.0), (300_001, 300_000.0), (2500, 1e-3), (2500, 1e-7)])
@pytest.mark.parametrize("tied", [False, True])
def test_sum_is_exact_when_few_or_nearly_all_are_kept(monkeypatch: pytest.MonkeyPatch, n: int, k: float, tied: bool) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = make_scores("equal" if tied else "means", n).double()
    for tau in (10.0, 1e-3):
        assert float(soft_topk(x, k, tau).sum()) == pytest.approx(k, rel=1e-10)


@pytest.mark.parametrize(("n", "kept", "k"), [(100_000, 2, 1.0), (1_000_000, 13, 10.0), (30_000, 3, 2.9)])
def test_sum_is_exact_when_few_of_many_equal_scores_are_kept(n: int, kept: int, k: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the sum lies in a tail of equal scores. Newton steps on the sum itself would gain one tau each."""
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = torch.full((n,), -2.1)
    x[:kept] = 0.0
    assert float(soft_topk(x, k, 1.0).double().sum()) == pytest.approx(k, rel=1e-6)


def test_sum_is_exact_for_very_unequal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        n = int(torch.randint(2, 200, (1,), generator=draw))
        x = torch.randn(n, generator=draw, dtype=torch.float64)
        cost = 10 ** (torch.rand(n, generator=draw, dtype=torch.float64) * 10 - 5)
        k = float(cost.sum()) * 10 ** float(-6 * torch.rand(1, generator=draw))
        tau = 10 ** float(torch.rand(1, generator=draw) * 4 - 3)
        assert float((soft_topk(x, k, tau, cost) * cost).sum()) == pytest.approx(k, rel=1e-9)


def test_exact_when_theta_lies_in_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    # The best blocks cost exactly k, so theta lies in a gap, and rounding errors of the sum must not move it.
    monkeypatch.setattr(topk, "BACKEND", "torch")
    for seed in range(100):
        g = torch.Generator().manual_seed(seed)
        x, c = torch.randn(40, generator=g).double(), torch.randint(1, 20, (40,), generator=g).double()
        k = float(c[x.argsort(descending=True)[: 1 + seed % 38]].sum())
        assert abs(float((c * soft_topk(x, k, 1e-5, c)).sum()) - k) <= 1e-10 * k


class OperationCount(TorchDispatchMode):
    """Counts operations that launch a kernel: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        free = ("view", "select", "unbind", "detach", "empty")
        self.count += not any(name in str(func) for name in free)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weighted", [False, True])
def test_never_synchronizes_the_device(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device="meta")
    monkeypatch.setattr(eager, "device_flag", lambda device: (flag, None, flag))
    x = torch.empty(100, device="meta", requires_grad=True)
    k, tau = (torch.empty((), dtype=torch.float64, device="meta") for _ in range(2))
    warm = torch.empty(2, 2, dtype=torch.float64, device="meta")
    with DeviceSyncs() as syncs:
        soft_topk(x, k, tau, torch.empty(100, device="meta") if weighted else None, warm=warm).sum().backward()
    assert x.grad is not None
    assert syncs.operations == []


def test_number_of_launches_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every operation is a launch. For comparison, 50 bisections take 460.
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = make_scores("means", 100).requires_grad_()
    with OperationCount() as forward:
        mask = soft_topk(x, 10, 1e-2)
    with OperationCount() as backward:
        mask.backward(torch.ones(100))
    assert forward.count <= 225
    assert backward.count <= 25


def test_constant_masks_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "torch")
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for k, value in ((0, 0.0), (3, 1.0)):
        x.grad = None
        mask = soft_topk(x, k, 0.1)
        mask.sum().backward()
        assert mask.tolist() == [value] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 3
    with pytest.raises(SmartpruneError, match="scores hold NaN or infinity"):
        soft_topk(torch.tensor([1.0, math.nan]), 1, 0.1)
    with pytest.raises(SmartpruneError, match="cost holds a negative number"):
        soft_topk(torch.ones(2), 1, 0.1, torch.tensor([3.0, -1.0]))
    monkeypatch.setattr(topk, "BACKEND", "fast")
    with pytest.raises(SmartpruneError, match="SMARTPRUNE_TOPK='fast' is unknown; use auto, torch or triton"):
        soft_topk(x, 1, 0.1)
