"""How many steps a second do several runs make together on one GPU?

python bench/together.py [--model resnet18] [--processes 1 2 4 8] [--mps] [--seconds 6] [--compile] [--out FILE.json]

Steps of a search on CIFAR-10 as `smartprune train` takes them, batch 128, bf16, CUDA graphs; the pictures are noise. All
processes warm up first and count from the same moment on. With --mps every number of processes is timed again under NVIDIA's
Multi-Process Service, in which kernels of several processes run side by side, and not in turns; the service is started for
it and ended. Compare the sums, not the runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

WARM = 30  # steps before the clock starts: kernels are chosen, and the graph is recorded
LOOK = 20  # steps between two looks at the device, so that no process runs far ahead of it
STARTS = 600  # seconds for all processes to be ready
USUAL = Path("/usr/local/nvidia/bin/nvidia-cuda-mps-control")


def count(model: str, compiled: bool, seconds: float, ready: Barrier, found: Any) -> None:
    try:
        found.put(steps_a_second(model, compiled, seconds, ready))
    except BaseException:
        ready.abort()  # the others need not wait
        raise


def steps_a_second(model: str, compiled: bool, seconds: float, ready: Barrier) -> float:
    import torch
    from train import make_run

    from smartprune.training.run import deterministic
    from smartprune.training.step import steps_of_epoch, take_step

    asked = argparse.Namespace(model=model, batch=128, device="cuda", amp="bf16", compile=compiled, pictures=50_000)
    run = make_run("search", asked, "auto")
    with deterministic(run.config):
        batches = (batch for _ in iter(int, 1) for batch in steps_of_epoch(run))  # epoch after epoch
        for _ in range(WARM):
            take_step(run, *next(batches))
        torch.cuda.synchronize()
        ready.wait(STARTS)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            take_step(run, *next(batches))
            steps += 1
            if steps % LOOK == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return steps / (time.perf_counter() - began)


def together(processes: int, args: argparse.Namespace) -> list[float]:
    """Steps a second of each."""
    spawn = multiprocessing.get_context("spawn")
    ready, found = spawn.Barrier(processes), spawn.Queue()
    given = (args.model, args.compile, args.seconds, ready, found)
    running = [spawn.Process(target=count, args=given, daemon=True) for _ in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        sys.exit(f"of {processes} processes {sum(bool(p.exitcode) for p in running)} failed; what they said is above")
    return [found.get() for _ in running]


class Service:
    """NVIDIA's Multi-Process Service, for the processes that are started in here."""

    def __enter__(self) -> None:
        control = shutil.which("nvidia-cuda-mps-control") or (str(USUAL) if USUAL.exists() else None)
        if control is None:
            sys.exit("--mps needs nvidia-cuda-mps-control, which comes with NVIDIA's driver; it is not here")
        self.control, self.folder = control, tempfile.mkdtemp()
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = self.folder
        subprocess.run([self.control, "-d"], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run([self.control], input="quit\n", text=True, check=False)
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            del os.environ[name]
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("resnet18", "densenet", "googlenet", "mobilenetv2"), default="resnet18")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    rows = []
    for shared in (False, True) if args.mps else (False,):
        with Service() if shared else nullcontext():
            for processes in args.processes:
                each = together(processes, args)
                method = f"{processes} processes" + ", MPS" * shared
                print(f"{method:<20} {sum(each):8.1f} steps/s together, {min(each):.1f} to {max(each):.1f} each", flush=True)
                common = {"model": args.model, "data": "noise at 32x32", "block": "16x8", "sparsity": 0.95, "protocol": "search"}
                row = {"method": method, "metric": "steps a second, together", "values": [sum(each)], "mean": sum(each)}
                rows.append({**common, **row, "std": None, "n": 1})
    if args.out:
        import torch

        told = {"rows": rows, "torch": torch.__version__, "compile": args.compile, "device": torch.cuda.get_device_name()}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
