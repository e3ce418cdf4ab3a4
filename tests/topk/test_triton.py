"""The CUDA kernels: on the GPU, or without one in the interpreter of Triton, in a child process."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.scores import no_start
from helpers.triton_interpreter import environment, loaded_loop_bounds, needs_interpreter, needs_triton, on_gpu, run_interpreted  # noqa: F401 (a fixture)
from smartprune import topk
from smartprune.errors import SmartpruneError
from smartprune.topk import check_device, hard_topk, soft_topk

TAUS = (10.0, 1e-3, 1e-7)


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


@needs_triton
def test_second_launch_calls_the_launcher_directly() -> None:
    # In a child process, because triton would cache the fake driver.
    code = "from topk import test_triton; test_triton.launch_twice()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def launch_twice() -> None:
    """Compiles the kernels for sm_90. A direct launch must pass the same arguments as a launch by triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from smartprune.topk import triton as topk_triton

    calls: list[tuple[Any, ...]] = []

    class Utils:
        def load_binary(self, *_: object) -> tuple[int, ...]:
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 17}

    class Driver:
        utils = Utils()

        def launcher_cls(self, *_: object) -> Any:
            return lambda *arguments: calls.append(arguments)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    def address(value: object) -> object:
        return value.data_ptr() if isinstance(value, Tensor) else value

    driver.set_active(Driver())
    topk.BACKEND = "triton"
    assert triton.__version__.startswith(("3.6.", "3.7.")) == topk_triton.DIRECT
    g = torch.ones(1024)
    for cost, warm in ((None, None), (torch.ones(1024), no_start()), (None, torch.stack((no_start(), no_start())))):
        calls.clear()
        x = torch.ones(1024, requires_grad=True)
        masks = [soft_topk(x, 100, 0.1, cost, warm=warm) for _ in range(2)]
        grads = [torch.autograd.grad(mask, x, g) for mask in masks]
        assert len(calls) == 4
        assert len(grads) == 2
        for usual, direct, fresh in ((calls[0], calls[1], {2, 3, 6}), (calls[2], calls[3], {3, 4})):
            assert (direct[6] is None) == topk_triton.DIRECT
            assert len(usual) == len(direct)
            for i, (one, other) in enumerate(zip(usual[9:], direct[9:], strict=True)):
                same = address(one) == address(other) and type(address(one)) is type(address(other))
                assert same or i in fresh, i  # allocated by the call: mask and state, out and state
    # unaligned scores are another kernel
    calls.clear()
    soft_topk(torch.ones(1025)[1:], 100, 0.1)
    assert isinstance(calls[0][9], Tensor)
    # a profiler sees every launch
    triton.knobs.runtime.launch_enter_hook.add(print)
    soft_topk(torch.ones(1024), 100, 0.1)
    soft_topk(torch.ones(1024), 100, 0.1)
    assert [call[6] is None for call in calls] == [False] * 3


def make(kind: str, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    table = {"means": x.abs() * 0.02, "near one": 1 + 1e-5 * x, "equal": torch.full((n,), 0.3), "huge": x * 1e4}
    return table[kind].to(device, dtype)


def costs(n: int, device: str = "cpu") -> Tensor:
    return (10 ** (6 * torch.rand(n, generator=torch.Generator().manual_seed(1)))).to(device)


def reference(x: Tensor, k: float, tau: float, cost: Tensor | None, g: Tensor) -> tuple[Tensor, Tensor]:
    """The mask and gradient in float64 on the CPU. test_topk.py compares that solver with slow loops."""
    leaf = x.detach().cpu().double().requires_grad_()
    mask = soft_topk(leaf, k, tau, None if cost is None else cost.cpu().double())
    mask.backward(g.cpu().double())
    assert leaf.grad is not None
    return mask.detach(), leaf.grad


def compare(
    x: Tensor,
    k: float,
    tau: float,
    cost: Tensor | None,
    g: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    backend: str = "triton",
) -> None:
    monkeypatch.setattr(topk, "BACKEND", "auto")
    mask, grad = reference(x, k, tau, cost, g)
    monkeypatch.setattr(topk, "BACKEND", backend)
    leaf = x.clone().requires_grad_()
    warm = no_start(str(x.device))
    got = soft_topk(leaf, k, tau, cost, warm=warm)
    got.backward(g.to(got.dtype))
    assert leaf.grad is not None
    again = soft_topk(x, k, tau, cost, warm=warm)
    tight = x.dtype == torch.float64
    spent = float((got.detach().double() * (1 if cost is None else cost)).sum())
    assert abs(spent / k - 1) < (1e-10 if tight else 1e-5)
    assert float((got.detach().cpu() - mask).abs().max()) < (1e-8 if tight else 3e-4)
    assert float((again - got.detach()).abs().max()) < (1e-8 if tight else 3e-4)
    scale = float(grad.abs().max()) + 1e-2 / tau
    assert float((leaf.grad.cpu() - grad).abs().max()) < (1e-6 if tight else 2e-3) * scale


@needs_interpreter
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
def test_interpreted_kernels_equal_the_cpu_solver(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (2, 600):
        x, cost = make(kind, n), costs(n) if weighted else None
        g = torch.randn(n, generator=torch.Generator().manual_seed(5))
        total = float(n if cost is None else cost.double().sum())
        for tau in TAUS:
            for share in (0.5,) if n == 2 else (0.3, 1 - 1 / n):
                compare(x, share * total, tau, cost, g, monkeypatch)


@needs_interpreter
def test_interpreted_float64_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for tau in (1.0, 1e-4):
        compare(make("means", 300, torch.float64), 77.5, tau, None, g, monkeypatch)
        x = make("means", 300, torch.bfloat16).requires_grad_()
        mask = soft_topk(x, 77, tau)
        mask.backward(g)
        assert mask.dtype == torch.float32
        assert x.grad is not None
        assert x.grad.dtype == torch.bfloat16


@needs_interpreter
def test_interpreted_constant_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    for k, value in ((0, 0.0), (5, 1.0)):
        x = torch.arange(5.0, requires_grad=True)
        mask = soft_topk(x, k, 0.1)
        mask.sum().backward()
        assert mask.tolist() == [value] * 5
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 5


@needs_interpreter
def test_interpreted_first_row_of_warm_is_read_and_second_row_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    x = make("means", 300)
    theta = torch.stack((torch.tensor([0.02, 1e-9], dtype=torch.float64), no_start()))
    start, place = theta[0].clone(), theta[0].clone()
    expected = soft_topk(x, 30, 1e-3, warm=place)
    for _ in range(2):
        assert torch.equal(soft_topk(x, 30, 1e-3, warm=theta), expected)
        assert torch.equal(theta[0], start)
        assert torch.equal(theta[1], place)


@needs_interpreter
def test_interpreted_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    x = make("means", 300)
    expected = soft_topk(x.clone().requires_grad_(), 30, 1e-3)
    got = [soft_topk(x, 30, 1e-3) for _ in range(2)]  # these share the scratch that backward would read
    assert all(torch.equal(mask, expected.detach()) for mask in got)
    assert float(soft_topk(x, 1e-310, 1e-3).max()) == 0.0  # its bits are a small integer


@needs_interpreter
@pytest.mark.parametrize(
    ("x", "cost", "text"),
    [
        (torch.tensor([1.0, math.nan]), None, "scores hold NaN"),
        (torch.tensor([1.0, -math.inf]), None, "scores hold NaN"),
        (torch.ones(2), torch.tensor([2.0, -1.0]), "cost holds a negative"),
        (torch.ones(2), torch.tensor([0.2, 0.3]), "k is outside"),
    ],
)
def test_interpreted_errors(x: Tensor, cost: Tensor | None, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    with pytest.raises(SmartpruneError, match=text):
        soft_topk(x, 1, 0.1, cost)
    soft_topk(torch.ones(2), 1, 0.1)  # the flag is cleared


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
@pytest.mark.parametrize("n", [2, 1000, 100_000, 1_000_000])
def test_gpu_equals_the_cpu_solver(kind: str, n: int, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, cost = make(kind, n, device="cuda"), costs(n, "cuda") if weighted else None
    g = torch.randn(n, generator=torch.Generator().manual_seed(5)).cuda()
    total = float(n if cost is None else cost.double().sum())
    for tau in TAUS:
        for share in (1 / n, 0.3, 1 - 1 / n):
            compare(x, share * total, tau, cost, g, monkeypatch)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gpu_errors_are_raised_by_the_next_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    good = torch.ones(4, device="cuda")
    bad = torch.tensor([1.0, math.nan, 2.0, 3.0], device="cuda")
    for call, text in (
        (lambda: soft_topk(bad, 2, 0.1), "scores hold NaN"),
        (lambda: soft_topk(good, torch.tensor(9.0, device="cuda"), 0.1), "k is outside"),
        (lambda: soft_topk(good, 2, torch.tensor(-1.0, device="cuda")), "tau is outside"),
        (lambda: soft_topk(good, 2, 0.1, -good), "cost holds a negative"),
    ):
        assert bool(call().isnan().all())
        torch.cuda.synchronize()
        with pytest.raises(SmartpruneError, match=text):
            soft_topk(good, 2, 0.1)
        check_device()
        assert not bool(soft_topk(good, 2, 0.1).isnan().any())


@pytest.mark.gpu
@on_gpu
def test_gpu_hard_topk_in_deterministic_mode() -> None:
    scores, cost = make("means", 5000), costs(5000).double() * math.pi
    k = 0.1 * float(cost.sum())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        kept = hard_topk(scores.cuda(), k, cost.cuda()).cpu()
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(kept, hard_topk(scores, k, cost))


@pytest.mark.gpu
@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gpu_calls_never_synchronize(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x, cost = make("means", 5000, device="cuda").requires_grad_(), costs(5000, "cuda")
    tau, k, warm = torch.tensor(1e-3, device="cuda"), torch.tensor(1e5, device="cuda"), no_start("cuda")
    soft_topk(x, k, tau, cost, warm=warm).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        soft_topk(x, k, tau, cost, warm=warm).sum().backward()
        soft_topk(x, 300, 1e-3).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gpu_graph_reads_tau_at_replay(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    n = 20_000
    x, g = make("means", n, device="cuda").requires_grad_(), torch.randn(n, device="cuda")
    tau, warm = torch.tensor(1e-2, device="cuda", dtype=torch.float64), no_start("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            soft_topk(x, 600, tau, warm=warm).backward(g)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        mask = soft_topk(x, 600, tau, warm=warm)
        mask.backward(g)
    for value in (1e-2, 3e-3, 1e-3, 1e-5, 1e-1):
        tau.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        monkeypatch.setattr(topk, "BACKEND", "auto")  # the reference is solved on the CPU
        expected, grad = reference(x, 600, value, None, g)
        assert float((mask.detach().cpu() - expected).abs().max()) < 3e-4
        assert x.grad is not None
        assert float((x.grad.cpu() - grad).abs().max()) < 2e-3 * float(grad.abs().max())
    check_device()


@pytest.mark.gpu
@on_gpu
def test_gpu_same_inputs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    x, g = make("means", 1_000_000, device="cuda"), torch.randn(1_000_000, device="cuda")
    runs = []
    for _ in range(5):
        leaf = x.clone().requires_grad_()
        mask = soft_topk(leaf, 30_000, 1e-4)
        mask.backward(g)
        runs.append((mask.detach(), leaf.grad))
    for mask, grad in runs[1:]:
        assert torch.equal(mask, runs[0][0])
        assert grad is not None
        assert torch.equal(grad, runs[0][1])


@pytest.mark.gpu
@on_gpu
def test_gpu_streams_do_not_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", "triton")
    x = make("means", 300_000, device="cuda")
    expected = soft_topk(x, 9_000, 1e-3)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(soft_topk(x, 9_000, 1e-3))
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
@on_gpu
def test_gpu_repeated_calls_and_unaligned_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call uses the direct launch. Scores may have any alignment."""
    monkeypatch.setattr(topk, "BACKEND", "triton")
    base, g = make("means", 50_001, device="cuda"), torch.randn(50_000, device="cuda")
    results = []
    for x in (base[1:], base[1:].clone(), base[1:].clone(), base[1:]):
        leaf = x.detach().requires_grad_()
        mask = soft_topk(leaf, 5_000, 1e-3)
        results.append((mask.detach(), *torch.autograd.grad(mask, leaf, g), soft_topk(x, 5_000, 1e-3)))
    monkeypatch.setattr(topk, "BACKEND", "auto")  # the reference is solved on the CPU
    expected, grad = reference(base[1:], 5_000, 1e-3, None, g)
    for mask, got, again in results:
        assert torch.equal(mask, again)
        assert float((mask.cpu() - expected).abs().max()) < 3e-4
        assert float((got.cpu() - grad).abs().max()) < 2e-3 * float(grad.abs().max())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_gpu_first_row_of_warm_is_read_and_second_row_written(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "BACKEND", backend)
    x, cost = make("means", 100_000, device="cuda"), costs(100_000, "cuda")
    for c, k in ((None, 9_000.0), (cost, 0.1 * float(cost.double().sum()))):
        theta = torch.stack((torch.tensor([0.03, 1e-9], dtype=torch.float64, device="cuda"), no_start("cuda")))
        start, place = theta[0].clone(), theta[0].clone()
        expected = soft_topk(x, k, 1e-4, c, warm=place)
        for _ in range(5):
            assert torch.equal(soft_topk(x, k, 1e-4, c, warm=theta), expected)
            assert torch.equal(theta[0], start)
            assert torch.equal(theta[1], place)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["means", "near one", "equal", "huge"])
def test_gpu_eager_solver_equals_the_cpu_solver(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (2, 1000, 100_000):
        x, cost = make(kind, n, device="cuda"), costs(n, "cuda") if weighted else None
        g = torch.randn(n, generator=torch.Generator().manual_seed(5)).cuda()
        total = float(n if cost is None else cost.double().sum())
        for tau in TAUS:
            for share in (1 / n, 0.3, 1 - 1 / n):
                compare(x, share * total, tau, cost, g, monkeypatch, "torch")
