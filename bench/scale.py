"""How much memory and time does a search take per block, with very many blocks? Run: python bench/scale.py 1e6 1e7 --out DIR

Every size runs in a process of its own. The model is a row of square linear layers, pruned in blocks of one weight, so it has as
many blocks as weights. The same training without a pruner is measured first and subtracted.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import smartprune as sp

WIDTH, STEPS = 1000, 6


def measure(blocks: int, method: str) -> dict[str, float]:
    """Seconds of the fastest step, and the largest size of the process in bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks // WIDTH**2)]
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    pruner = None
    if method != "dense":
        pruner = sp.attach(model, method, block=(1, 1), sparsity=0.9, include="*", steps=1000)
        parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    x, seconds = torch.randn(4, WIDTH), []
    for _ in range(STEPS):
        start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        if pruner is not None:
            pruner.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"seconds": min(seconds[1:]), "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("blocks", nargs="*", type=float, default=[1e6, 1e7])
    parser.add_argument("--methods", default="smart,gradual")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.blocks[0]), args.one)))
        return
    rows = []
    for blocks in args.blocks:
        results = {}
        for method in ("dense", *args.methods.split(",")):
            command = [sys.executable, __file__, str(blocks), "--one", method]
            results[method] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            dense, own = results["dense"], results[method]
            row = {"method": method, "blocks": int(blocks), "seconds_per_step": own["seconds"], "peak_bytes": own["bytes"]}
            row["bytes_per_block"] = (own["bytes"] - dense["bytes"]) / blocks
            row["nanoseconds_per_block"] = 1e9 * (own["seconds"] - dense["seconds"]) / blocks
            rows.append({**row, "n": STEPS - 1})
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine(), "threads": 1}
        data = {"command": "python bench/scale.py " + " ".join(f"{b:g}" for b in args.blocks), "versions": machine, "rows": rows}
        (args.out / "result.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
