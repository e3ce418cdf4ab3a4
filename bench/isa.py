"""How fast are the kernels of each instruction set of this machine, and how fast were they in another checkout?

python bench/isa.py [--before FOLDER] [--rounds 2] [--repeats 40] [--out records/isa-cpu]

ResNet18 and MobileNetV2 with 90 % of 16x8 blocks zero at random, batch 1, one thread. The two checkouts take turns, in processes
of their own. A time is processor time, the least of the calls of a round. The output of every network is compared with the float
model's by the self-check of ``accelerate``; that of int8 is switched off, because random weights amplify every rounding error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS
from smartprune.runtime import module
from smartprune.runtime.cpu import build

ROOT = Path(__file__).resolve().parents[1]
NETWORKS, SIDE, SHARE, BLOCK = ("resnet18", "mobilenetv2"), 32, 0.9, (16, 8)
CELLS = {"float32": ("avx2", "avx512", "neon"), "int8": ("avx2", "avx512", "avx512vnni", "neon", "neon_dot", "neon_i8mm")}
NOTE = (
    "Processor time of one thread, the least of the calls of a round. Other programs used the machine: differences below 10 % are "
    "noise. Masks are random and remove 90 % of the blocks of every layer alike. 'before' is the checkout before int8 results were "
    "stored from registers and batches run in parts; the ratio compares times of one round."
)


def pruned(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for layer in model.modules():
        if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)) and layer.weight.shape[1] >= BLOCK[1]:
            grid = sp.Block(*BLOCK).grid(tuple(layer.weight.shape))
            layer.weight.data *= grid.expand((torch.rand(grid.n) >= SHARE).float())
    return model


def worker(repeats: int) -> None:
    """Prints the milliseconds of every cell as JSON."""
    torch.set_num_threads(1)
    module.TOLERANCE_INT8 = float("inf")  # its name in older checkouts
    getattr(module, "TOLERANCES", {})["int8"] = float("inf")
    out = {}
    for name in NETWORKS:
        model, x = pruned(name), torch.randn(1, 3, SIDE, SIDE)
        for dtype, sets in CELLS.items():
            for isa in sets:
                if isa not in build.supported_sets():
                    continue
                os.environ["SMARTPRUNE_ISA"] = isa
                fast = sp.accelerate(model, example=x, dtype=dtype, threads=1, backend="native" if dtype == "float32" else "auto")
                times = []
                for _ in range(repeats):
                    start = time.thread_time()
                    fast(x)
                    times.append(time.thread_time() - start)
                out[f"{name}/{isa}, {dtype}"] = 1e3 * min(times)
    print(json.dumps(out))


def measure(source: Path, repeats: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--repeats", str(repeats)]
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def rows(after: list[dict[str, float]], before: list[dict[str, float]]) -> list[dict[str, Any]]:
    out = []
    for cell in after[0]:
        name, method = cell.split("/")
        values = {"ms": [round[cell] for round in after]}
        if before and cell in before[0]:
            values["before / after"] = [old[cell] / new[cell] for old, new in zip(before, after, strict=True)]
        for metric, numbers in values.items():
            spread = statistics.stdev(numbers) if len(numbers) > 1 else None
            common = {"model": name, "data": f"1x3x{SIDE}x{SIDE}", "method": method, "block": "16x8", "sparsity": SHARE}
            common |= {"protocol": "random masks", "unit": "ms" if metric == "ms" else "ratio", "metric": metric, "values": numbers}
            out.append(common | {"mean": statistics.mean(numbers), "std": spread, "n": len(numbers)})
            print(f"{name:12s} {method:22s} {metric:16s} {statistics.mean(numbers):8.3f}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of smartprune")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.repeats)
        return
    after, before = [], []
    for _ in range(args.rounds):
        if args.before is not None:
            before.append(measure(args.before, args.repeats))
        after.append(measure(ROOT, args.repeats))
    found = rows(after, before)
    if args.out is not None:
        commit = ""
        if args.before is not None:
            command = ["git", "-C", str(args.before), "rev-parse", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        settings = {"rounds": args.rounds, "repeats": args.repeats, "before": commit, "block": BLOCK, "sparsity": SHARE}
        machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        save_record(args.out, {"rows": found}, settings, NOTE, [f"python bench/isa.py --before FOLDER --out {args.out}"], [machine])


if __name__ == "__main__":
    main()
