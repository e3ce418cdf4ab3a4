"""How long does soft_topk take, next to 50 float64 bisections, torch.topk and one read of the scores?

python bench/topk.py [--out FILE.json] [--device cpu|cuda] [--sizes 1e4,1e5,1e6,1e7] [--tune]

All columns come from one run on the same scores (block means, k = N / 10); compare ratios, not milliseconds. On CUDA
the operator is timed launched from Python ("eager", including launch overhead) and replayed as a CUDA graph.
"""

import argparse
import importlib.util
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smartprune import topk
from smartprune.topk import soft_topk

TAUS = (1e-2, 1e-5)
DRIFT = 0.01  # between two warm calls every score moves by about this many tau


def bisection(x: Tensor, k: float, tau: float, g: Tensor | None) -> Tensor:
    """50 halvings in float64 without waiting for the device, and the closed-form gradient."""
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


def timed(call: Callable[[], object], device: str, budget: float = 1.0) -> dict[str, float]:
    """Median and spread (quartiles) in milliseconds; on CUDA between events, 10 calls per sample."""
    call()
    call()
    inner = 10 if device == "cuda" else 1
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - began < budget and len(samples) < 200):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / inner)
        else:
            tick = time.perf_counter()
            call()
            samples.append((time.perf_counter() - tick) * 1e3)
    quarters = statistics.quantiles(samples, n=4)
    return {"ms": statistics.median(samples), "low": quarters[0], "high": quarters[2], "n": len(samples)}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def operator(
    versions: list[Tensor], k: int, tau: float, g: Tensor | None, warm: Tensor | None, cost: Tensor | None = None
) -> Callable[[], object]:
    """One call per step; the scores alternate between versions that differ by the drift."""
    state = {"i": 0}

    def call() -> Tensor:
        state["i"] = (state["i"] + 1) % len(versions)
        x = versions[state["i"]]
        limit = k if cost is None else 0.1 * float(costs_total[cost.data_ptr()])
        mask = soft_topk(x, limit, tau, cost, warm=warm)
        if g is not None:
            torch.autograd.grad(mask, x, g)
        return mask

    return call


costs_total: dict[int, float] = {}


def measure(n: int, tau: float, device: str, backends: list[str], budget: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(n, generator=generator).abs() * 0.02
    versions = [
        (base + DRIFT * tau * torch.randn(n, generator=generator)).to(device).requires_grad_() for _ in range(4)
    ]
    g = torch.randn(n, generator=generator).to(device)
    cost = (1 + 63 * torch.rand(n, generator=generator)).to(device)
    costs_total[cost.data_ptr()] = float(cost.double().sum())
    k = n // 10
    x = versions[0].detach()
    rows: dict[str, dict[str, float]] = {}
    rows["read: x.sum()"] = timed(lambda: x.sum(), device, budget)
    rows["torch.topk"] = timed(lambda: x.topk(k), device, budget)
    rows["bisection 50, forward"] = timed(lambda: bisection(x, k, tau, None), device, budget)
    rows["bisection 50, both"] = timed(lambda: bisection(x, k, tau, g), device, budget)
    worst = 0.0
    for backend in backends:
        topk.BACKEND = "auto" if backend == "cpu" else backend
        warm = torch.full((2,), math.nan, dtype=torch.float64, device=device)
        for name, start, weight in (("cold", None, None), ("warm", warm, None), ("warm, costs", warm.clone(), cost)):
            for part, grad in (("forward", None), ("both", g)):
                label = f"{backend} {name}, {part}"
                rows[label] = timed(operator(versions, k, tau, grad, start, weight), device, budget)
                if device == "cuda" and name == "warm":
                    # a graph repeats one version of the scores, so its warm start is already the solution ...
                    replay = captured(operator(versions[:1], k, tau, grad, start, weight))
                    rows[label + ", graph, still"] = timed(replay, device, budget)
                    # ... and four calls in one graph see the drift
                    four = operator(versions, k, tau, grad, start, weight)
                    replay = captured(lambda four=four: [four() for _ in range(4)])
                    row = timed(replay, device, budget)
                    rows[label + ", graph, drift"] = {key: v if key == "n" else v / 4 for key, v in row.items()}
                if device == "cuda" and name == "cold":
                    replay = captured(operator(versions[:1], k, tau, grad, start, weight))
                    rows[label + ", graph"] = timed(replay, device, budget)
            mask = soft_topk(x, k if weight is None else 0.1 * costs_total[cost.data_ptr()], tau, weight, warm=start)
            got = float((mask.double() * (1 if weight is None else weight)).sum())
            goal = k if weight is None else 0.1 * costs_total[cost.data_ptr()]
            worst = max(worst, abs(got / goal - 1))
    topk.BACKEND = "auto"
    return {"N": n, "tau": tau, "k": k, "relative error of the sum": worst, "rows": rows}


def tune(device: str, budget: float) -> None:
    """Tile sizes and warps of the kernels, warm, forward and backward, replayed as a graph."""
    from smartprune import topk_triton

    kept = list(topk_triton.TILES)
    for n in (10_000, 100_000, 1_000_000, 10_000_000):
        x = (torch.randn(n, device=device).abs() * 0.02).requires_grad_()
        g = torch.randn(n, device=device)
        for block, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 8), (4096, 16), (8192, 16)):
            topk_triton.TILES[:] = [(1 << 62, block, warps)]
            warm = torch.full((2,), math.nan, dtype=torch.float64, device=device)
            try:
                row = timed(captured(operator([x], n // 10, 1e-3, g, warm)), device, budget)
            except Exception as error:
                print(f"N={n:>9} block={block:5} warps={warps:2} failed: {error}")
                continue
            print(f"N={n:>9} block={block:5} warps={warps:2} {row['ms'] * 1e3:8.1f} us")
    topk_triton.TILES[:] = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", default="1e4,1e5,1e6,1e7")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=0.5, help="seconds per row")
    parser.add_argument("--tune", action="store_true", help="try tile sizes of the CUDA kernels and stop")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.tune:
        return tune(options.device, options.budget)
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
    for size in options.sizes.split(","):
        for tau in TAUS:
            result = measure(int(float(size)), tau, options.device, backends, options.budget)
            record["results"].append(result)
            rows = result["rows"]
            print(f"\nN={result['N']} tau={tau:g} k={result['k']} |sum/k-1|<={result['relative error of the sum']:.1e}")
            print(f"{'':40}{'ms':>10}{'quartiles':>20}{'x bisection':>13}{'x read':>9}")
            for label, row in rows.items():
                rival = rows["bisection 50, forward" if "forward" in label else "bisection 50, both"]["ms"]
                ratio = f"{rival / row['ms']:.1f}" if "," in label else ""
                spread = f"{row['low']:.4f}-{row['high']:.4f}"
                slower = row["ms"] / rows["read: x.sum()"]["ms"]
                print(f"{label:40}{row['ms']:10.4f}{spread:>20}{ratio:>13}{slower:9.1f}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
