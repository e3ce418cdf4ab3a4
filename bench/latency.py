"""Does a network that was pruned to a time take that time, and does it lose less than one pruned to a number of blocks?

python bench/latency.py [--models resnet18 ...] [--shares 0.5 0.75] [--digits 0.4 0.6 --seeds 0 1] [--record NAME --note TEXT]

For every network and share, smartprune.latency times the runtime, and its table chooses a mask. Then the dense and the pruned
networks take turns, in rounds. A run is the fastest of at least five calls in 10 ms, in processor time on one thread, so that
other programs matter less.

"share of dense, % of the promise" is what the budget promises: the median over the rounds of the time of the pruned network
divided by that of the dense one in the same round, as a percentage of 1 - share. "time, % of the promise" compares the median with
the milliseconds of the table. The machine may be faster or slower by then: "time, % of the table" says so for the dense network.

Blocks are ranked by the squares of their weights, without any training: as they are, as a budget in blocks does, and per
picosecond that the latency budget says they cost. Both masks are cut where the table puts the same time. Weights are random, with
one scale for each output channel, and batch norms are random; the error of the outputs is relative, on noise.

--digits 0.4 0.6 also prunes small trained networks, one for every seed, without further training (smartprune.prune) to these
shares of the time, and to the number of blocks that the table puts at the same time. It compares the accuracy and the measured
times.

This records all of it: python bench/latency.py --digits 0.4 0.6 0.75 --record latency-cpu --note TEXT
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS
from smartprune.runtime.latency_table import machine_name

ROOT = Path(__file__).parents[1]
SIDES = {"resnet18": 32, "mobilenetv2": 32, "resnet50": 64}
BLOCK = (16, 8)
CALLS, TURN_MS = 5, 10  # of a network in each round, at least
HALVINGS = 8


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


def times_of(models: Sequence[nn.Module], x: Tensor, rounds: int) -> list[list[float]]:
    """Milliseconds of every round of each model, which take turns."""
    fast = [sp.accelerate(model, example=x, threads=1) for model in models]
    out: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, values in zip(fast, out, strict=True):
            calls: list[float] = []
            while len(calls) < CALLS or sum(calls) < TURN_MS:
                start = time.thread_time_ns()
                model(x)
                calls.append((time.thread_time_ns() - start) / 1e6)
            values.append(min(calls))
    return out


def row(method: str, share: float, metric: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    return {
        "model": "networks",
        "data": "noise and digits",
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
        try:
            plan = sp.plan(model, BLOCK, budget=budget).require()
        except sp.SmartpruneError as error:
            print(f"{name} {share}: {error}", file=sys.stderr, flush=True)
            most = 100 * (1 - table.network.ps[0] / table.dense_ps)
            rows.append(row(f"{name}: latency budget", share, "cannot be met; most of the time that can be removed, %", [most]))
            continue
        assert plan.exact is not None
        promised = (plan.bound[0] or 0) / 1e9
        by_time, by_blocks = pruned(model, plan, True), pruned(model, plan, False)
        times = times_of([by_time[0], by_blocks[0], model], x, rounds)
        for method, (network_, left), values in zip(("latency", "blocks"), (by_time, by_blocks), times, strict=False):
            label = f"{name}: {method} budget"
            ratio = 100 * statistics.median(values) / promised
            of_dense = statistics.median(ms / dense for ms, dense in zip(values, times[2], strict=True))
            rows += [
                row(label, share, "time, % of the promise", [ratio], ms=values, promised_ms=promised),
                row(label, share, "share of dense, % of the promise", [100 * of_dense / (1 - share)]),
                row(label, share, "error of the outputs, %", [100 * error_of(network_, model, test)]),
                row(label, share, "blocks left, %", [100 * left]),
            ]
        rows.append(
            row(
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


def digits(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network that is trained on the digits of scikit-learn, and 1,200 training and 597 test images with labels."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    layers: list[nn.Module] = []
    for before, after, stride in ((1, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4)
    for _ in range(8):
        for batch in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval(), x, y


def accuracies(shares: Sequence[float], seeds: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Accuracy after smartprune.prune with a budget in time, and with the budget in blocks that the table puts at the same time."""
    values: dict[tuple[str, float, str], list[float]] = {}
    for seed in seeds:
        for method, share, metric, value in _accuracies(shares, seed, rounds):
            values.setdefault((method, share, metric), []).append(value)
            print(f"seed {seed}: {method} {share}: {metric} {value:.2f}", file=sys.stderr, flush=True)
    return [row(f"six convolutions on digits: {method}", share, metric, v) for (method, share, metric), v in values.items()]


def _accuracies(shares: Sequence[float], seed: int, rounds: int) -> Iterator[tuple[str, float, str, float]]:
    """Method, share, metric and value, for one trained network."""
    model, x, y = digits(seed)

    def prune(budget: sp.Budget) -> tuple[nn.Module, Tensor]:
        out = copy.deepcopy(model)
        receipt = sp.prune(out, [x[:256]], block=BLOCK, budget=budget)
        return out.eval(), torch.cat([layer.mask().reshape(-1) for layer in receipt.layers])

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float((network(x[1200:]).argmax(1) == y[1200:]).double().mean())

    measured = sp.latency(0, example=x[:1])
    sp.plan(model, BLOCK, budget=measured)
    (table,) = measured.measured.values()
    yield "dense", 0.0, "accuracy, %", accuracy(model)
    for share in shares:
        budget = sp.latency(share, example=x[:1], table=table)
        try:
            exact = sp.plan(model, BLOCK, budget=budget).require().exact
        except sp.SmartpruneError as error:
            print(f"seed {seed}: {share}: {error}", file=sys.stderr, flush=True)
            continue
        assert exact is not None
        low, high, by_blocks = 0.0, 1.0, None
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            candidate = prune(sp.blocks(middle))
            if exact.of(candidate[1]) <= exact.limit:
                high, by_blocks = middle, candidate
            else:
                low = middle
        assert by_blocks is not None
        pruned_models = {"latency budget": prune(budget), "blocks budget": by_blocks}
        *times, dense = times_of([*(network_ for network_, _ in pruned_models.values()), model], x[:1], rounds)
        for (method, (network_, mask)), values in zip(pruned_models.items(), times, strict=True):
            yield method, share, "accuracy, %", accuracy(network_)
            yield method, share, "blocks left, %", 100 * float(mask.double().mean())
            yield method, share, "share of dense, %", 100 * statistics.median(a / b for a, b in zip(values, dense, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SIDES))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.75])
    parser.add_argument("--digits", nargs="*", type=float, default=[], help="shares of time for the trained network")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], help="of the trained networks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", help="name of a folder of records/")
    parser.add_argument("--note", default="", help="what the record does not show")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    jobs = [*((lambda name=name: measure(name, args.shares, args.rounds)) for name in args.models)]
    for job in [*jobs, *([lambda: accuracies(args.digits, args.seeds, args.rounds)] if args.digits else [])]:
        rows += job()
    if args.record is None:
        print(json.dumps(rows, indent=1))
        return
    machine = {"device": machine_name(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
    settings = {key: value for key, value in vars(args).items() if key not in ("record", "note")} | machine
    words = " ".join(["--models", *args.models, "--shares", *map(str, args.shares), "--digits", *map(str, args.digits)])
    words += " ".join([" --seeds", *map(str, args.seeds), "--rounds", str(args.rounds)])
    on = ", ".join(f"{key} {value}" for key, value in machine.items())
    save_record(ROOT / "records" / args.record, {"rows": rows}, settings, args.note, [f"python bench/latency.py {words}"], [on])


if __name__ == "__main__":
    main()
