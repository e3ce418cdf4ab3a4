"""Does a network that was pruned to a time take that time, and does it lose less than one pruned to a number of blocks?

python bench/latency.py [--models resnet18 ...] [--shares 0.5 0.75] [--rounds 5] [--out FILE.json]

For every network and share, smartprune.latency times the runtime, and its table chooses a mask. Then the dense and the pruned
networks take turns, in rounds. A time is the median over the rounds of the least of the calls of a round, in processor time on
one thread, so that other programs matter less. "of the promise" is that time as a share of the promised one. On a busy machine the
dense network itself is slower than in the table; "share of dense" compares with the dense network of the same rounds.

Blocks are ranked by the squares of their weights, without any training: as they are, as a budget in blocks does, and per
picosecond that the latency budget says they cost. Both masks are cut where the table puts the same time. Weights are random, with
one scale for each output channel, and batch norms are random; the error of the outputs is relative, on noise.
"""

from __future__ import annotations

import argparse
import copy
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
from smartprune.runtime.latency_table import machine_name

SIDES = {"resnet18": 32, "mobilenetv2": 32, "resnet50": 64}
BLOCK = (16, 8)
CALLS = 5


def network(name: str) -> nn.Module:
    """A network with random weights and batch norms, and the statistics of its batch norms on noise."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.weight.mul_(torch.empty(len(module.weight)).log_normal_(0, 0.5).view(-1, *[1] * (module.weight.dim() - 1)))
    sp.recalibrate(model, [torch.randn(16, 3, SIDES[name], SIDES[name]) for _ in range(2)])
    return model.eval()


def pruned(model: nn.Module, plan: sp.Plan, per_time: bool) -> tuple[nn.Module, float]:
    """A copy with the blocks whose weights have the largest squares, per picosecond or not, and the share of blocks left."""
    weights = dict(model.named_parameters())
    rank = torch.cat([layer.grid.sum(weights[layer.weight].detach().double().square()) for layer in plan.layers])
    if per_time:
        assert plan.cost is not None
        rank = rank / plan.cost.clamp(min=1)
    assert plan.exact is not None
    mask = plan.exact.best(rank)
    assert mask is not None
    out = copy.deepcopy(model)
    with torch.no_grad():
        for layer in plan.layers:
            weight = out.get_parameter(layer.weight)
            weight.masked_fill_(layer.grid.expand(mask[layer.start : layer.stop].float()) == 0, 0)
    return out, float(mask.double().mean())


def error_of(model: nn.Module, reference: nn.Module, x: Tensor) -> float:
    """The relative error of the outputs."""
    with torch.no_grad():
        a, b = model(x), reference(x)
    return float((a - b).norm() / b.norm())


def medians(models: Sequence[nn.Module], x: Tensor, rounds: int) -> list[list[float]]:
    """Milliseconds of every round of each model, which take turns."""
    fast = [sp.accelerate(model, example=x, threads=1) for model in models]
    out: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, values in zip(fast, out, strict=True):
            least = []
            for _ in range(CALLS):
                start = time.thread_time_ns()
                model(x)
                least.append((time.thread_time_ns() - start) / 1e6)
            values.append(min(least))
    return out


def row(model: str, method: str, share: float, metric: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": "noise",
        "method": method,
        "block": "16x8",
        "sparsity": share,
        "protocol": "one thread, one sample",
        "metric": metric,
        "values": list(values),
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        **more,
    }


def measure(name: str, shares: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    model, side = network(name), SIDES[name]
    x, test = torch.randn(1, 3, side, side), torch.randn(32, 3, side, side)
    measured = sp.latency(0, example=x)
    sp.plan(model, BLOCK, budget=measured)
    (table,) = measured.measured.values()
    rows = []
    for share in shares:
        budget = sp.latency(share, example=x, table=table)
        plan = sp.plan(model, BLOCK, budget=budget)
        assert plan.exact is not None
        promised = (plan.bound[0] or 0) / 1e9
        by_time, by_blocks = pruned(model, plan, True), pruned(model, plan, False)
        times = medians([by_time[0], by_blocks[0], model], x, rounds)
        for method, (network_, left), values in zip(("latency", "blocks"), (by_time, by_blocks), times, strict=False):
            label = f"{name}: {method} budget"
            ratio = 100 * statistics.median(values) / promised
            of_dense = statistics.median(values) / statistics.median(times[2])
            rows += [
                row(name, label, share, "time, % of the promise", [ratio], ms=values, promised_ms=promised),
                row(name, label, share, "share of dense, % of the promise", [100 * of_dense / (1 - share)]),
                row(name, label, share, "error of the outputs, %", [100 * error_of(network_, model, test)]),
                row(name, label, share, "blocks left, %", [100 * left]),
            ]
        rows.append(
            row(
                name,
                f"{name}: dense",
                share,
                "time, % of the table",
                [1e11 * statistics.median(times[2]) / table.dense_ps],
                ms=times[2],
            )
        )
        for entry in rows[-9:]:
            print(f"{entry['method']} {share}: {entry['metric']} {entry['mean']:.2f}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += measure(name, args.shares, args.rounds)
        machine = {"device": machine_name(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
        text = json.dumps({"settings": {**vars(args), "out": None}, **machine, "rows": rows}, indent=1)
        if args.out is not None:
            args.out.write_text(text)
    if args.out is None:
        print(text)


if __name__ == "__main__":
    main()
