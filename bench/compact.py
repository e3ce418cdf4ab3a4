"""How much of a network can be removed with its empty channels, and how much faster is it then in torch?

python bench/compact.py [--models resnet18 ...] [--blocks 16x8 ...] [--sparsity 0.7 0.9 0.95] [--rounds 5] [--out FILE.json]

Masks are synthetic: random blocks are zero, and a layer of n blocks keeps a share proportional to n ** -0.5, so that small layers
stay denser, as with learned masks. The parameters of batch normalizations are random, so that empty channels are constants
other than zero, as in trained networks. For every case the dense and the compacted network take turns in one process, on one
thread and one sample. The time of a round is the least of its calls, and the speed-up compares times of one round.

--run FOLDER ... measures finished runs instead, with their own learned masks.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.models import MODELS

SIDES = {"resnet18": 32, "mobilenetv2": 32, "yolov5m": 320, "bisenetv2": 512}
BLOCKS = ("16x8", "16xNone", "1xNone")  # None: all input channels and the whole kernel
SPARSITIES = (0.7, 0.9, 0.95)
PROFILE = 0.5
CALLS = 5  # of a round


def block_of(text: str) -> tuple[int | None, ...]:
    """``16x8``, or ``16xNone`` for blocks of whole output channels."""
    sizes = tuple(None if size == "None" else int(size) for size in text.split("x"))
    return (*sizes, None, None) if None in sizes else sizes


def build(name: str, block: str, sparsity: float) -> nn.Module:
    """A network with random zero blocks."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
        layers = sp.plan(model, block_of(block), sparsity=0.5).layers
        total = sum(layer.grid.n for layer in layers)
        low, high = 0.0, 1e9
        for _ in range(100):  # the factor that keeps the requested number of blocks
            factor = (low + high) / 2
            kept = sum(layer.grid.n * min(1.0, factor * layer.grid.n**-PROFILE) for layer in layers)
            low, high = (factor, high) if kept < (1 - sparsity) * total else (low, factor)
        for layer in layers:
            owner, attribute = layer.sites[0]
            count = max(1, round(min(1.0, low * layer.grid.n**-PROFILE) * layer.grid.n))
            mask = torch.zeros(layer.grid.n)
            mask[torch.randperm(layer.grid.n)[:count]] = 1
            weight = getattr(model.get_submodule(owner), attribute)
            weight.mul_(layer.grid.expand(mask))
    return model


def load(folder: Path) -> tuple[nn.Module, Tensor, str, float, str]:
    """The model of a run, an example, the block, the sparsity and the accuracy."""
    from smartprune.cli.models import load_run

    model, example, receipt, _task, config = load_run(folder, trust=False)
    assert receipt is not None
    result = json.loads((folder / "result.json").read_text())
    return model.eval(), example, str(receipt.block), float(config.sparsity), json.dumps(result.get("metrics", {}))[:200]


def times(models: Sequence[nn.Module], x: Tensor, rounds: int) -> list[list[float]]:
    """Milliseconds of each model in each round. The models take turns."""
    out: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for model in models:
            model(x)
        for _ in range(rounds):
            for model, values in zip(models, out, strict=True):
                calls = []
                for _ in range(CALLS):
                    start = time.perf_counter()
                    model(x)
                    calls.append(1000 * (time.perf_counter() - start))
                values.append(min(calls))
    return out


def row(model: str, data: str, block: str, sparsity: float, metric: str, method: str, values: Sequence[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {
        "model": model,
        "data": data,
        "method": method,
        "block": block,
        "sparsity": sparsity,
        "protocol": "torch, one thread, one sample",
        "metric": metric,
        "values": list(values),
        "mean": statistics.fmean(values),
        "std": std,
        "n": len(values),
    }


def measure(name: str, data: str, block: str, sparsity: float, model: nn.Module, x: Tensor, rounds: int) -> list[dict[str, Any]]:
    small = sp.compact(model, x)
    report = sp.compaction(small)
    assert report.macs is not None
    dense, compacted = times((model, small), x, rounds)
    method = f"{name}, {block}"
    shares = {"params left": report.parameters, "MACs left": report.macs}
    rows = [
        row(name, data, block, sparsity, f"{metric}, %", method, [100 * after / before])
        for metric, (before, after) in shares.items()
    ]
    ratios = [a / b for a, b in zip(dense, compacted, strict=True)]
    rows.append(row(name, data, block, sparsity, "times faster", method, ratios))
    rows[-1] |= {"ms dense": dense, "ms compacted": compacted}
    shown = ", ".join(f"{entry['metric']} {entry['mean']:.2f}" for entry in rows)
    print(f"{name} {block} {sparsity}: {shown}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="finished runs to measure instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for folder in args.run:
        model, x, block, sparsity, _ = load(folder)
        rows += measure(type(model).__name__, f"learned, {folder.name}", block, sparsity, model, x, args.rounds)
    if not args.run:
        for name in args.models:
            x = torch.randn(1, 3, SIDES[name], SIDES[name])
            for block in args.blocks:
                for sparsity in args.sparsity:
                    rows += measure(name, "random masks", block, sparsity, build(name, block, sparsity), x, args.rounds)
    machine = {"device": platform.machine(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
    result = {"settings": {**vars(args), "out": None, "run": [path.name for path in args.run]}, "versions": machine, "rows": rows}
    text = json.dumps(result, indent=1)
    print(text) if args.out is None else args.out.write_text(text)


if __name__ == "__main__":
    main()
