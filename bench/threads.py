"""How much faster are two threads than one, for every network and several batches, and what limits them?

python bench/threads.py [--models resnet18 ...] [--batch 1 8 32] [--threads 2] [--rounds 5] [--seconds 0.3] [--out FOLDER]
                        [--limits-only]

90 % of 16x8 blocks are zero at random, alike in every layer. One thread and several take turns; a round's time is the least wall
time of its calls, and a speed-up compares times of one round. It needs a machine with as many idle cores as threads: another
program on one of them halves the speed-up.

The efficiency is the speed-up over the number of threads. Its limit is computed from the times of the operations in one thread.
Threads work on different parts of a batch, if there are enough. Otherwise they divide every operation: small ones run in one
thread, and the others consist of items of equal cost, of which some thread gets the most. The limit leaves out that cores share
memory and caches. Operations are timed one by one, so it can be measured on a busy machine: --limits-only.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import runtime as bench
import smartprune as sp
from smartprune.experiments.compare.record import save_record

SHARE = 0.9
SIDES = {**bench.SIDES, "googlenet": 32, "densenet": 32}
NOTE = (
    "Random masks remove 90 % of the blocks of every layer alike. The efficiency is the speed-up over the number of threads, and a "
    "speed-up compares the least wall times of the calls of a round. The limit of the efficiency is computed from the least times "
    "of operations in one thread: threads work on different parts of a batch, or small operations run in one thread and the others "
    "have whole items. It leaves out what cores share."
)


def least(call: Callable[[], object], seconds: float) -> float:
    """The wall time of the fastest call."""
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            return best


def limit(single: Any, several: Any, x: Tensor, threads: int, calls: int = 5) -> float:
    """The largest speed-up that the numbers of parts and items and the small operations allow."""
    one = many = 0.0
    for alone, shared in zip(single.plan(x).programs, several.plan(x).programs, strict=True):
        with alone.timer() as times:
            for _ in range(calls):
                single(x)
        parts, divided = shared._parts.fields, 0.0
        for operation, is_light, nanoseconds in zip(shared._compiled.operations, shared._light, times, strict=True):
            items = operation.items
            divided += nanoseconds if is_light or items < 2 else nanoseconds * math.ceil(items / threads) / items
        together = parts.together / parts.parts  # the share of the batch that whole threads work on
        one += sum(times)
        many += together * sum(times) / parts.arenas + (1 - together) * divided
    return one / many


def measure(name: str, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    bench.SIDES[name] = SIDES[name]
    model = bench.build(name, SHARE, None, 0.0)
    x = torch.randn(batch, *bench.shape(name))
    with torch.no_grad():
        single, several = (sp.accelerate(model, example=x, threads=n, backend="native") for n in (1, args.threads))
        assert torch.equal(single(x), several(x)) if isinstance(single(x), Tensor) else True
        ratios = []
        for _ in range(0 if args.limits_only else args.rounds):
            a, b = (least(lambda fast=fast: fast(x), args.seconds) for fast in (single, several))  # type: ignore[misc]
            ratios.append(a / b)
        bound = limit(single, several, x, args.threads)
    measured = [] if args.limits_only else [("efficiency", [ratio / args.threads for ratio in ratios])]
    out = []
    for metric, values in (*measured, ("limit", [bound / args.threads])):
        spread = statistics.stdev(values) if len(values) > 1 else None
        common = {"model": "networks", "data": "random", "method": name, "block": "16x8", "sparsity": SHARE, "unit": "of linear"}
        common |= {"protocol": f"batch {batch}", "metric": metric, "values": values}
        out.append({**common, "mean": statistics.mean(values), "std": spread, "n": len(values)})
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios) or "not measured"
    print(f"{name:12s} batch {batch:2d}: speed-up with {args.threads} threads {shown}; limit {bound:.2f}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing per round")
    parser.add_argument("--limits-only", action="store_true", help="do not time several threads")
    parser.add_argument("--out", type=Path, help="folder of the record")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}, with {os.cpu_count()} processors")
    found = [row for name in args.models for batch in args.batch for row in measure(name, batch, args)]
    if args.out is not None:
        settings = {
            "limits_only": args.limits_only,
            "rounds": args.rounds,
            "seconds": args.seconds,
            "sparsity": SHARE,
            "threads": args.threads,
        }
        machine = (
            f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
        )
        command = f"python bench/threads.py{' --limits-only' if args.limits_only else ''} --out {args.out}"
        save_record(args.out, {"rows": found}, settings, NOTE, [command], [machine])


if __name__ == "__main__":
    main()
