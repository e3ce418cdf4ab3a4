"""The operator soft_topk, compared with slow references that share no code with it."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.scores import TEMPERATURES, bisect, make_costs, make_scores, no_start
from smartprune import topk
from smartprune.errors import SmartpruneError
from smartprune.topk import soft_topk

X = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "coarse", "huge", "sorted"])
@pytest.mark.parametrize("n", [2, 3, 17, 1000, 40_000])
def test_sum_is_exact_for_every_temperature(kind: str, n: int, weighted: bool) -> None:
    x = make_scores(kind, n)
    cost = make_costs(n) if weighted else None
    total = float(n if cost is None else cost.double().sum())
    for k in {1.0, float(n // 3 or 1), float(n // 2), n - 1.0}:
        k = k * total / n
        for tau in TEMPERATURES:
            mask = soft_topk(x, k, tau, cost)
            got = float((mask.double() if cost is None else mask.double() * cost.double()).sum())
            assert mask.dtype == torch.float32
            assert abs(got / k - 1) < 1e-5, (k, tau)
            assert bool(((mask >= 0) & (mask <= 1)).all())


@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
@pytest.mark.parametrize("n", [2, 300])
def test_sum_is_exact_in_float64(kind: str, n: int) -> None:
    x = make_scores(kind, n).double()
    cost = make_costs(n).double()
    for tau in TEMPERATURES:
        for share in (1 / n, 0.5, 1 - 1 / n):
            assert abs(float(soft_topk(x, share * n, tau).sum()) / (share * n) - 1) < 1e-10
            k = share * float(cost.sum())
            assert abs(float((soft_topk(x, k, tau, cost) * cost).sum()) / k - 1) < 1e-10


@pytest.mark.parametrize("kind", ["means", "near one", "coarse", "sorted"])
@pytest.mark.parametrize("tau", [1.0, 1e-2, 1e-4, 1e-6])
def test_elements_equal_bisection(kind: str, tau: float) -> None:
    x = make_scores(kind, 2000)
    cost = make_costs(2000)
    # float32: z is exact to a few ulp of itself
    np.testing.assert_allclose(soft_topk(x, 300, tau), bisect(x, 300, tau), atol=5e-5)
    np.testing.assert_allclose(soft_topk(x.double(), 300, tau), bisect(x, 300, tau), atol=1e-9)
    k = 0.2 * float(cost.double().sum())
    np.testing.assert_allclose(soft_topk(x, k, tau, cost), bisect(x, k, tau, cost), atol=5e-5)
    np.testing.assert_allclose(soft_topk(x.double(), k, tau, cost.double()), bisect(x, k, tau, cost), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_small_problems(data: st.DataObject) -> None:
    finite = st.floats(-1e4, 1e4, width=32)
    x = torch.tensor(data.draw(st.lists(finite, min_size=2, max_size=12)))
    cost = torch.tensor(data.draw(st.lists(st.floats(0, 1e3, width=32), min_size=len(x), max_size=len(x))))
    tau = 10 ** data.draw(st.floats(-7, 1))
    total = float(cost.double().sum())
    k = data.draw(st.floats(0.01, 0.99)) * total
    x.requires_grad_()
    mask = soft_topk(x, k, tau, cost)
    mask.square().sum().backward()
    assert abs(float((mask.detach().double() * cost).sum()) - k) <= 1e-5 * k + 1e-30
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    order = x.detach().argsort()
    assert bool((mask.detach()[order].diff() >= 0).all())


def test_k_of_zero_or_all_gives_a_constant_mask() -> None:
    cost = torch.tensor([1.0, 2.0, 0.0])
    for k, c, value in ((0, None, 0.0), (3, None, 1.0), (0, cost, 0.0), (3, cost, 1.0)):
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        warm = no_start()
        mask = soft_topk(x, k, 0.1, c, warm=warm)
        mask.sum().backward()
        assert mask.tolist() == [value] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 3
        assert bool(warm.isnan().all())


def test_zero_cost_blocks_follow_the_threshold_and_do_not_count() -> None:
    x = torch.tensor([3.0, 2.0, 1.0, 0.0])
    mask = soft_topk(x, 1, 0.01, torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert mask.tolist() == pytest.approx([1, 1, 0, 0], abs=1e-6)


def test_one_score() -> None:
    assert soft_topk(torch.tensor([5.0]), 0.25, 0.1).tolist() == pytest.approx([0.25])


def test_k_and_tau_may_be_tensors() -> None:
    x = make_scores("means", 50)
    expected = soft_topk(x, 10, 0.01)
    got = soft_topk(x, torch.tensor(10), torch.tensor(0.01, dtype=torch.float64))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("n", [1000, 100_000])
@pytest.mark.parametrize("tau", [1.0, 1e-3, 1e-6])
def test_any_warm_start_gives_the_same_solution(n: int, tau: float) -> None:
    x = make_scores("means", n).double()
    cold, warm = no_start(), no_start()
    reference = soft_topk(x, n // 10, tau, warm=cold)
    for start in (x.mean().item(), -50.0, 1e6, math.inf, cold.sum().item()):
        warm[:] = torch.tensor([start, 0.0])
        assert float((soft_topk(x, n // 10, tau, warm=warm) - reference).abs().max()) < 1e-9
        assert float(warm.sum() - cold.sum()) == pytest.approx(0, abs=1e-8 * tau + 1e-15)


@pytest.mark.parametrize("n", [500, 80_000])
def test_same_inputs_give_the_same_bits(n: int) -> None:
    x = make_scores("means", n)
    for warm in (None, torch.tensor([0.03, 1e-9], dtype=torch.float64)):
        runs = []
        for _ in range(2):
            leaf, start = x.clone().requires_grad_(), None if warm is None else warm.clone()
            mask = soft_topk(leaf, n // 7, 1e-4, warm=start)
            mask.square().sum().backward()
            assert leaf.grad is not None
            runs.append((mask.detach(), leaf.grad, start))
        assert torch.equal(runs[0][0], runs[1][0])
        assert torch.equal(runs[0][1], runs[1][1])
        assert warm is None or torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("weighted", [False, True])
def test_first_row_of_warm_is_read_and_second_row_written(backend: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    n, tau = 40_000, 1e-4
    x, cost = make_scores("means", n), make_costs(n) if weighted else None
    k = 0.1 * float(n if cost is None else cost.double().sum())
    theta = torch.stack((torch.tensor([0.03, 1e-9], dtype=torch.float64), no_start()))
    place, start = theta[0].clone(), theta[0].clone()
    expected = soft_topk(x, k, tau, cost, warm=place)
    for _ in range(3):  # equal starts give equal bits
        assert torch.equal(soft_topk(x, k, tau, cost, warm=theta), expected)
        assert torch.equal(theta[0], start)
        assert torch.equal(theta[1], place)
    soft_topk(x, 0, tau, cost, warm=theta)
    assert torch.equal(theta[0], start)
    assert bool(theta[1].isnan().all())


def test_autocast_does_not_change_the_mask() -> None:
    x = make_scores("means", 5000)
    with torch.autocast("cpu", torch.bfloat16):
        inside = soft_topk(x, 700, 1e-3)
    assert torch.equal(inside, soft_topk(x, 700, 1e-3))


def test_noncontiguous_scores() -> None:
    x = make_scores("means", 400)
    leaf = x.clone().requires_grad_()
    soft_topk(leaf[::2], 30, 1e-3).square().sum().backward()
    dense = x[::2].clone().requires_grad_()
    soft_topk(dense, 30, 1e-3).square().sum().backward()
    assert leaf.grad is not None
    assert dense.grad is not None
    assert torch.equal(leaf.grad[::2], dense.grad)


def test_compiles_once_for_all_temperatures() -> None:
    compiled = []

    def spy(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    counts = []
    torch._dynamo.reset()
    step = torch.compile(masked_loss, backend=spy, fullgraph=True)
    for tau in (0.1, 0.05, 0.01, 0.001):
        compare_gradients(step, tau)
        counts.append(len(compiled))
    torch._dynamo.reset()
    assert counts == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports torch.jit
def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    compare_gradients(torch.compile(masked_loss, backend="inductor"), 0.01)
    torch._dynamo.reset()


def test_compiled_call_updates_the_warm_start_and_raises() -> None:
    def run(x: Tensor, k: Tensor, warm: Tensor) -> Tensor:
        return soft_topk(x, k, 0.01, torch.ones_like(x), warm=warm)

    torch._dynamo.reset()
    step = torch.compile(run, backend="aot_eager", fullgraph=True)
    x, warm, expected = make_scores("means", 100), no_start(), no_start()
    assert torch.equal(step(x, torch.tensor(10), warm), soft_topk(x, 10, 0.01, torch.ones(100), warm=expected))
    assert torch.equal(warm, expected)
    with pytest.raises(SmartpruneError, match=re.escape("k=101.0 is outside [0, 100]")):
        step(x, torch.tensor(101), warm)
    theta = torch.stack((no_start(), no_start()))
    step(x, torch.tensor(10), theta)
    assert bool(theta[0].isnan().all())
    assert torch.equal(theta[1], expected)
    torch._dynamo.reset()


def test_import_does_not_load_dynamo_or_triton() -> None:
    # without the __init__ of smartprune, which imports everything else
    code = f"""
import sys, types
package = types.ModuleType("smartprune")
package.__path__ = [{str(Path(topk.__file__).parents[1])!r}]
sys.modules["smartprune"] = package
import torch
loaded = "torch._dynamo" in sys.modules
import smartprune.topk
assert ("torch._dynamo" in sys.modules) == loaded
assert "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def masked_loss(x: Tensor, w: Tensor, tau: Tensor) -> Tensor:
    return (soft_topk(x * 1.0, 10, tau) * w.exp()).square().sum()


def compare_gradients(step: Callable[[Tensor, Tensor, Tensor], Tensor], tau: float) -> None:
    w = torch.randn(100, generator=torch.Generator().manual_seed(1))
    x, y = make_scores("means", 100).requires_grad_(), make_scores("means", 100).requires_grad_()
    step(x, w, torch.tensor(tau)).backward()
    masked_loss(y, w, torch.tensor(tau)).backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.allclose(x.grad, y.grad)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: soft_topk(torch.tensor([1.0, math.nan]), 1, 0.1),
            "soft_topk: scores hold NaN or infinity; scores must",
        ),
        (lambda: soft_topk(torch.tensor([1.0, math.inf]), 1, 0.1), "finite: lower their learning rate or clip their"),
        (lambda: soft_topk(X, 1, 0), "soft_topk: tau=0.0: tau is outside [1e-30, 1e+30] or NaN; give a positive"),
        (lambda: soft_topk(X, 1, -0.1), "tau=-0.1"),
        (lambda: soft_topk(X, 1, math.nan), "tau=nan"),
        (lambda: soft_topk(X, 1, torch.tensor(math.inf)), "tau=inf"),
        (lambda: soft_topk(X, 4, 0.1), "soft_topk: k=4.0 is outside [0, 3]; give the number (or the cost) to keep"),
        (lambda: soft_topk(X, -1, 0.1), "k=-1.0 is outside [0, 3]"),
        (lambda: soft_topk(X, math.nan, 0.1), "k=nan is outside [0, 3]"),
        (lambda: soft_topk(X, 7, 0.1, 2 * torch.ones(3)), "k=7.0 is outside [0, 6]"),
        (lambda: soft_topk(X, -1, 0.1, 2 * torch.ones(3)), "k=-1.0 is outside [0, sum(cost)]"),
        (lambda: soft_topk(X, 1, 0.1, torch.tensor([1.0, -1.0, 2.0])), "cost holds a negative number, NaN or infinity"),
        (lambda: soft_topk(X, 1, 0.1, torch.tensor([1.0, math.nan, 2.0])), "costs must be finite and >= 0: correct"),
        (lambda: soft_topk(X, 1, 0.1, torch.ones(2)), "cost is float32 [2] on cpu; it must be real, [3] and on cpu"),
        (lambda: soft_topk(X, torch.ones(2), 0.1), "k is float32 [2] on cpu; give a number or a 0-dim tensor"),
        (lambda: soft_topk(X, "2", 0.1), "k='2' is not a number"),  # type: ignore[arg-type]
        (lambda: soft_topk(X, 1, True), "tau=True is not a number"),
        (
            lambda: soft_topk(X[:0], 0, 0.1),
            "scores are float32 [0] on cpu; they must be one non-empty vector of float64",
        ),
        (lambda: soft_topk(X[None], 0, 0.1), "scores are float32 [1, 3] on cpu"),
        (lambda: soft_topk(X.int(), 0, 0.1), "scores are int32 [3] on cpu"),
        (
            lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(2)),
            "warm is float32 [2] on cpu; it must be float64 [2] on cpu",
        ),
        (
            lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(3, 2).double()),
            "warm is float64 [3, 2] on cpu; it must be float64 [2] on cpu, or [2, 2], contiguous",
        ),
        (lambda: soft_topk(X, 1, 0.1, warm=torch.zeros(2).double().expand(2, 2)), "or [2, 2], contiguous and without"),
    ],
)
def test_error_messages(call: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(SmartpruneError, match=re.escape(text)):
        call()


def test_numbers_of_numpy_are_accepted() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0])
    assert torch.equal(soft_topk(scores, np.float32(2), np.float32(0.5)), soft_topk(scores, 2.0, 0.5))


def test_scores_that_are_not_a_tensor_raise() -> None:
    with pytest.raises(SmartpruneError, match="scores is a list"):
        soft_topk([1.0, 2.0], 1, 0.1)  # type: ignore[arg-type]
