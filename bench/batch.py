"""How long does an image take in a batch, compared with one alone?

python bench/batch.py [--before FOLDER] [--models resnet18 ...] [--batch 1 8 32] [--rounds 3] [--seconds 1] [--out records/batch]

90 % of 16x8 blocks are zero at random, alike in every layer, and one thread runs the network. A time is processor time per image,
the least of the calls of a round. Two checkouts take turns, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import runtime as bench
import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.runtime import module

ROOT = Path(__file__).resolve().parents[1]
SHARE = 0.9
NOTE = (
    "Processor time per image of one thread, the least of the calls of a round, relative to the time of an image alone in the same "
    "round and checkout. Other programs used the machine and its third-level cache, which large batches need: a quiet machine may "
    "show less of a difference. Masks are random and alike in every layer. 'before' is the checkout before batches ran in parts."
)


def worker(args: argparse.Namespace) -> None:
    """Prints the milliseconds per image of every cell as JSON."""
    torch.set_num_threads(1)
    module.TOLERANCE_INT8 = float("inf")  # its name in older checkouts; random weights make int8 inaccurate
    getattr(module, "TOLERANCES", {})["int8"] = float("inf")
    out: dict[str, float] = {}
    for name in args.models:
        model = bench.build(name, SHARE, None, 0.0)
        for dtype in ("float32", "int8"):
            for batch in args.batch:
                x = torch.randn(batch, *bench.shape(name))
                fast = sp.accelerate(model, example=[x], dtype=dtype, threads=1, backend="native" if dtype == "float32" else "auto")
                best, end = math.inf, time.thread_time() + args.seconds
                while time.thread_time() < end:
                    start = time.thread_time()
                    fast(x)
                    best = min(best, time.thread_time() - start)
                out[f"{name}, {dtype}/{batch}"] = 1e3 * best / batch
    print(json.dumps(out))


def measure(source: Path, args: argparse.Namespace) -> dict[str, float]:
    options = ["--worker", "--seconds", str(args.seconds), "--models", *args.models, "--batch", *map(str, args.batch)]
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def rows(found: dict[str, list[dict[str, float]]], one: int) -> list[dict[str, Any]]:
    out = []
    for label, rounds in found.items():
        for cell in rounds[0]:
            method, batch = cell.split("/")
            common = {"model": "networks", "data": "random", "method": method + label, "block": "16x8", "sparsity": SHARE}
            ratios = [times[cell] / times[f"{method}/{one}"] for times in rounds]
            for metric, unit, values in (
                ("ms per image", "ms", [times[cell] for times in rounds]),
                ("to one image", "ratio", ratios),
            ):
                spread = statistics.stdev(values) if len(values) > 1 else None
                numbers = {"values": values, "mean": statistics.mean(values), "std": spread, "n": len(values)}
                out.append(common | {"protocol": f"batch {batch}", "metric": metric, "unit": unit} | numbers)
            print(f"{method + label:24s} batch {batch:3s} {out[-2]['mean']:8.4f} ms per image, {out[-1]['mean']:.3f} of one alone")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of smartprune")
    parser.add_argument("--models", nargs="+", default=["resnet18"], choices=bench.SIDES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing per cell and round")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    sources = ({", before": args.before} if args.before is not None else {}) | {"": ROOT}
    found: dict[str, list[dict[str, float]]] = {label: [] for label in sources}
    for _ in range(args.rounds):
        for label, source in sources.items():
            found[label].append(measure(source, args))
    result = rows(found, args.batch[0])
    if args.out is not None:
        settings: dict[str, Any] = {"rounds": args.rounds, "seconds": args.seconds, "load": os.getloadavg()[0]}
        if args.before is not None:
            command = ["git", "-C", str(args.before), "rev-parse", "HEAD"]
            settings["before"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        machine = f"{bench.processor()}, 1 thread, torch {torch.__version__}"
        save_record(
            args.out, {"rows": result}, settings, NOTE, [f"python bench/batch.py --before FOLDER --out {args.out}"], [machine]
        )


if __name__ == "__main__":
    main()
