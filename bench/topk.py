"""How long does soft_topk take, compared with 50 float64 bisections, torch.topk and one read of the scores?

python bench/topk.py [--out FILE.json] [--device cpu|cuda] [--sizes 1e4,1e5,1e6,1e7] [--tune]

All columns come from one run on the same scores (block means, k = N / 10); compare ratios, not milliseconds. On CUDA the
operator is timed in eager mode, including launch overhead, and replayed as a CUDA graph. FILE is written after every size.
"""

import argparse
import functools
import importlib.util
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from graphs import capture
from torch import Tensor

from smartprune import topk
from smartprune.topk import soft_topk

TAUS = (1e-2, 1e-5)
MAX_EAGER = 1_000_000  # the eager PyTorch solver is not timed for more scores
DRIFT = 0.01  # change of the scores between two warm calls, in units of tau


def bisection(x: Tensor, k: float, tau: float, g: Tensor | None) -> Tensor:
    """50 bisection steps in float64 without synchronization, and the closed-form gradient."""
    wide = x.double()
    logit = math.log(k / (x.numel() - k))
    low, high = wide.min() - tau * logit, wide.max() - tau * logit
    for _ in range(50):
        middle = (low + high) / 2
        above = torch.sigmoid((wide - middle) / tau).sum() > k
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    mask = torch.sigmoid((wide - (low + high) / 2) / tau)
    if g is None:
        return mask.float()
    v = mask * (1 - mask)
    return (v / tau * (g - (v * g).sum() / v.sum())).float()


def time_call(call: Callable[[], object], device: str, budget: float, calls: int = 1) -> dict[str, float]:
    """Median and quartiles in milliseconds per call, measured with events on CUDA. ``call`` makes ``calls`` calls."""
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    tick = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    once = time.perf_counter() - tick
    inner = max(1, min(10, int(5e-3 / max(once, 1e-9)))) if device == "cuda" else 1
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 3 or (time.perf_counter() - began < budget and len(samples) < 200):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / inner / calls)
        else:
            tick = time.perf_counter()
            call()
            samples.append((time.perf_counter() - tick) * 1e3 / calls)
    quarters = statistics.quantiles(samples, n=4)
    return {"ms": statistics.median(samples), "low": quarters[0], "high": quarters[2], "n": len(samples)}


def make_operator(
    versions: list[Tensor], k: float, tau: float, g: Tensor | None, warm: Tensor | None, cost: Tensor | None = None
) -> Callable[[], object]:
    """A call per step. The scores alternate between versions that differ by the drift."""
    state = {"i": 0}

    def call() -> Tensor:
        state["i"] = (state["i"] + 1) % len(versions)
        x = versions[state["i"]]
        mask = soft_topk(x, k, tau, cost, warm=warm)
        if g is not None:
            torch.autograd.grad(mask, x, g)
        return mask

    return call


def measure(n: int, tau: float, device: str, backends: list[str], budget: float) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)

    def random() -> Tensor:
        return torch.randn(n, generator=generator, device=device)

    base = random().abs() * 0.02
    versions = [(base + DRIFT * tau * random()).requires_grad_() for _ in range(4)]
    g, k = random(), n // 10
    x = versions[0].detach()
    rows: dict[str, dict[str, float]] = {}
    rows["read: x.sum()"] = time_call(lambda: x.sum(), device, budget)
    rows["torch.topk"] = time_call(lambda: x.topk(k), device, budget)
    for part, grad in (("forward", None), ("both", g)):
        bisect = functools.partial(bisection, x, k, tau, grad)
        rows[f"bisection 50, {part}"] = time_call(bisect, device, budget)
        if device == "cuda":
            rows[f"bisection 50, {part}, graph"] = time_call(capture(bisect), device, budget)
    worst = 0.0
    for backend in backends:
        if backend == "torch" and n > MAX_EAGER:
            continue
        topk.BACKEND = "auto" if backend == "cpu" else backend
        cases: list[tuple[str, Tensor | None, Tensor | None]] = [("cold", None, None)]
        if backend != "torch":  # which has no warm start
            cases.append(("warm", empty_start(device), None))
        if device == "cpu" or n == 100_000:
            cases.append(("costs", None if backend == "torch" else empty_start(device), 1 + 63 * random().abs()))
        for name, start, cost in cases:
            goal = float(k) if cost is None else 0.1 * float(cost.double().sum())
            for part, grad in (("forward", None), ("both", g)):
                label = f"{backend} {name}, {part}"
                rows[label] = time_call(make_operator(versions, goal, tau, grad, start, cost), device, budget)
                if device == "cuda":
                    # Four calls in one graph, so that a warm start sees the drift.
                    four = make_operator(versions, goal, tau, grad, start, cost)
                    replay = capture(lambda four=four: [four() for _ in versions])
                    rows[f"{label}, graph"] = time_call(replay, device, budget, calls=len(versions))
            mask = soft_topk(x, goal, tau, cost, warm=start)
            worst = max(worst, abs(float((mask.double() * (1 if cost is None else cost)).sum()) / goal - 1))
    topk.BACKEND = "auto"
    return {"N": n, "tau": tau, "k": k, "relative error of the sum": worst, "rows": rows}


def empty_start(device: str) -> Tensor:
    return torch.full((2,), math.nan, dtype=torch.float64, device=device)


def summary(results: list[dict[str, Any]], backend: str) -> str:
    """A table in microseconds for forward and backward, with the speed-up over bisection in the same mode, the speed-up over
    torch.topk (forward only), and the time in reads of the scores."""
    modes = ["", ", graph"] if any("bisection 50, both, graph" in result["rows"] for result in results) else [""]
    names = [(case, mode) for case in ("warm", "cold") for mode in modes]
    titles = [case + mode for case, mode in names] + ["bisect" + mode for mode in modes]
    if backend == "triton":
        titles += ["plain" + mode for mode in modes]
    head = f"{'N':>9}{'tau':>7}" + "".join(f"{title:>14}" for title in [*titles, "topk", "read"])
    lines = [head + f"{'x bisect' + modes[-1]:>17}{'x topk':>8}{'reads':>7}"]
    for result in results:
        rows = result["rows"]

        def us(label: str, rows: dict[str, dict[str, float]] = rows) -> float:
            return rows[label]["ms"] * 1e3 if label in rows else math.nan

        cells = [us(f"{backend} {case}, both{mode}") for case, mode in names]
        cells += [us(f"bisection 50, both{mode}") for mode in modes]
        if backend == "triton":
            cells += [us(f"torch cold, both{mode}") for mode in modes]
        best, read = us(f"{backend} warm, both{modes[-1]}"), us("read: x.sum()")
        line = f"{result['N']:>9}{result['tau']:>7.0e}" + "".join(f"{c:>14.1f}" for c in [*cells, us("torch.topk"), read])
        ratios = (us(f"bisection 50, both{modes[-1]}") / best, us("torch.topk") / us(f"{backend} warm, forward{modes[-1]}"))
        lines.append(line + f"{ratios[0]:>17.1f}{ratios[1]:>8.1f}{best / read:>7.1f}")
    return "\n".join(lines)


def tune(device: str, budget: float) -> None:
    """Times tile sizes and numbers of warps of the kernels: warm, forward and backward, as a CUDA graph."""
    from smartprune.topk import triton as solver

    kept = list(solver.TILES)
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        x = (torch.randn(n, device=device).abs() * 0.02).requires_grad_()
        g = torch.randn(n, device=device)
        for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 8), (4096, 16), (8192, 16)):
            solver.TILES[:] = [(1 << 62, block, warps)]
            solver.plans.clear()
            try:
                row = time_call(capture(make_operator([x], n // 10, 1e-3, g, empty_start(device))), device, budget)
            except Exception as error:
                print(f"N={n:>9} block={block:5} warps={warps:2} failed: {error}")
                continue
            print(f"N={n:>9} block={block:5} warps={warps:2} {row['ms'] * 1e3:8.1f} us")
    solver.TILES[:] = kept
    solver.plans.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", default="1e4,1e5,1e6,1e7")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, help="seconds per row (default: 0.5 on the CPU, 0.06 on CUDA)")
    parser.add_argument("--tune", action="store_true", help="only time tile sizes of the CUDA kernels")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    budget = options.budget or (0.5 if options.device == "cpu" else 0.06)
    if options.tune:
        return tune(options.device, budget)
    has_triton = importlib.util.find_spec("triton") is not None
    backends = ["cpu"] if options.device == "cpu" else (["triton"] if has_triton else []) + ["torch"]
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    record: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": options.threads,
        "drift in tau": DRIFT,
        "results": [],
    }
    if has_triton:
        import triton

        record["triton"] = triton.__version__
    began = time.perf_counter()
    for size in options.sizes.split(","):
        for tau in TAUS:
            result = measure(int(float(size)), tau, options.device, backends, budget)
            record["results"].append(result)
            rows = result["rows"]
            print(f"\nN={result['N']} tau={tau:g} k={result['k']} |sum/k-1|<={result['relative error of the sum']:.1e}")
            print(f"{'':40}{'ms':>10}{'quartiles':>20}{'x bisection':>13}{'x read':>9}")
            for label, row in rows.items():
                reference = f"bisection 50, {'forward' if 'forward' in label else 'both'}"
                reference += ", graph" if "graph" in label else ""
                ratio = f"{rows[reference]['ms'] / row['ms']:.1f}" if "," in label else ""
                spread = f"{row['low']:.4f}-{row['high']:.4f}"
                slower = row["ms"] / rows["read: x.sum()"]["ms"]
                print(f"{label:40}{row['ms']:10.4f}{spread:>20}{ratio:>13}{slower:9.1f}", flush=True)
        record["seconds"] = time.perf_counter() - began
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
    print(f"\n{record['seconds']:.0f} s. Microseconds, forward and backward:\n{summary(record['results'], backends[0])}")


if __name__ == "__main__":
    main()
