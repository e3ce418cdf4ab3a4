"""How many steps per second do several runs make together on one GPU?

python bench/together.py [--model resnet18] [--processes 1 2 4 8] [--mps] [--seconds 6] [--compile] [--out FILE.json]

Times search steps of `smartprune train` on CIFAR-10 with batch size 128, bf16 and CUDA graphs. The images are noise. All
processes warm up first and start counting together. --mps repeats the measurement under NVIDIA's Multi-Process Service, which
runs kernels of several processes concurrently instead of in turns. The service is started and stopped by this script. Compare
the sums, not single runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from contextlib import nullcontext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from smartprune.experiments.sweep.mps import MultiProcessService

WARMUP = 30  # steps that select kernels and capture the graph
SYNC_INTERVAL = 20  # steps between synchronizations, so that no process queues too much work
START_TIMEOUT = 600  # seconds until all processes are ready


def count(model: str, compiled: bool, seconds: float, ready: Barrier, results: Any) -> None:
    try:
        results.put(steps_per_second(model, compiled, seconds, ready))
    except BaseException:
        ready.abort()  # the other processes must not wait
        raise


def steps_per_second(model: str, compiled: bool, seconds: float, ready: Barrier) -> float:
    import torch
    from train import make_run

    from smartprune.training.run import deterministic
    from smartprune.training.step import steps_of_epoch, take_step

    options = argparse.Namespace(model=model, batch=128, device="cuda", amp="bf16", compile=compiled, pictures=50_000)
    run = make_run("search", options, "auto")
    with deterministic(run.config):
        batches = (batch for _ in iter(int, 1) for batch in steps_of_epoch(run))  # epoch after epoch
        for _ in range(WARMUP):
            take_step(run, *next(batches))
        torch.cuda.synchronize()
        ready.wait(START_TIMEOUT)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            take_step(run, *next(batches))
            steps += 1
            if steps % SYNC_INTERVAL == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return steps / (time.perf_counter() - began)


def run_processes(processes: int, args: argparse.Namespace) -> list[float]:
    """Steps per second of each process."""
    spawn = multiprocessing.get_context("spawn")
    ready, results = spawn.Barrier(processes), spawn.Queue()
    arguments = (args.model, args.compile, args.seconds, ready, results)
    running = [spawn.Process(target=count, args=arguments, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        sys.exit(f"{sum(bool(p.exitcode) for p in running)} of {processes} processes failed; see their errors above")
    return [results.get() for _ in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet18", "densenet", "googlenet", "mobilenetv2"), default="resnet18")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    rows = []
    for shared in (False, True) if args.mps else (False,):
        with MultiProcessService() if shared else nullcontext():
            for processes in args.processes:
                rates = run_processes(processes, args)
                method = f"{processes} processes" + ", MPS" * shared
                print(f"{method:<20} {sum(rates):8.1f} steps/s together, {min(rates):.1f} to {max(rates):.1f} each", flush=True)
                common = {"model": args.model, "data": "noise at 32x32", "block": "16x8", "sparsity": 0.95, "protocol": "search"}
                row = {"method": method, "metric": "steps a second, together", "values": [sum(rates)], "mean": sum(rates)}
                rows.append({**common, **row, "std": None, "n": 1})
    if args.out:
        import torch

        result = {"rows": rows, "torch": torch.__version__, "compile": args.compile, "device": torch.cuda.get_device_name()}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
