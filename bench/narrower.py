"""Is a pruned network more accurate than a narrower dense network with as many MACs?

python bench/narrower.py [--seeds 5] [--widths 6 4] [--out FILE.json]

Digits and resnet8, which is 12 channels wide. A dense network of each smaller width is trained from scratch. The wide network is
trained for 30 epochs, and Smart and Gradual prune it to the MACs of the narrower one in 40 epochs of search and 30 of
fine-tuning. All networks are trained for 100 epochs in total. ``macs`` in the rows is the share of the wide network's MACs that is
removed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smartprune as sp
from smartprune.core.usage import measure
from smartprune.tasks.digits import Digits

WIDTH, BLOCK, BATCH = 12, (8, 4), 64
DENSE, SEARCH, TUNING = 30, 40, 30  # epochs
RATE, LATER_RATE = 0.1, 0.05
METHODS = ("smart", "gradual")


def train(task: Digits, model: nn.Module, epochs: int, rate: float, seed: int, pruner: sp.Pruner | None = None) -> None:
    """Trains with a cosine schedule. A pruner searches for its steps and fine-tunes afterwards."""
    data = task.data("train", torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    if pruner is not None and pruner.parameters():
        scores = {id(p) for p in pruner.parameters()}
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if id(p) not in scores]
        optimizer.add_param_group(pruner.param_group(lr=rate))
    per_epoch = sum(1 for _ in data.batches(BATCH, seed, 0))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * per_epoch)
    for epoch in range(epochs):
        for batch in data.batches(BATCH, seed, epoch):
            task.loss(model.train(), batch).backward()
            optimizer.step()
            if pruner is not None:
                pruner.step()
            optimizer.zero_grad()
            schedule.step()


@torch.no_grad()
def accuracy(task: Digits, model: nn.Module) -> float:
    batches = list(task.data("test", torch.device("cpu")).batches(500, 0, 0))
    return sum(int((model.eval()(x).argmax(1) == y).sum()) for x, y in batches) / sum(len(y) for _, y in batches)


def pruned(task: Digits, dense: nn.Module, method: str, macs: int, seed: int) -> tuple[float, int]:
    """The accuracy, and the MACs that are left, which are at most ``macs``."""
    model = copy.deepcopy(dense)
    data = task.data("train", torch.device("cpu"))
    batches = list(data.batches(BATCH, seed, 0))
    example = batches[0][0][:1]
    usage = measure(model, example)
    prunable = sum(layer.params * usage.uses(layer)[0] for layer in sp.plan(model, BLOCK, 0.5).layers)
    share = (usage.macs - macs) / prunable
    pruner = sp.attach(model, method, BLOCK, budget=sp.macs(share, example=example), steps=SEARCH * len(batches), example=example)
    train(task, model, SEARCH + TUNING, LATER_RATE, seed, pruner)
    receipt = sp.bake(model)
    assert receipt.model_macs is not None
    return accuracy(task, model), receipt.model_macs.kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--widths", nargs="+", type=int, default=[6, 4])
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wide_task = Digits(width=WIDTH)
    example = next(iter(wide_task.data("test", torch.device("cpu")).batches(1, 0, 0)))[0]
    total = measure(wide_task.model("resnet8"), example).macs
    values: dict[tuple[str, float], list[float]] = {}
    dense: list[float] = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        wide = wide_task.model("resnet8")
        train(wide_task, wide, DENSE, RATE, seed)
        dense.append(accuracy(wide_task, wide))
        for width in args.widths:
            task = Digits(width=width)
            torch.manual_seed(seed)
            narrow = task.model("resnet8")
            macs = measure(narrow, example).macs
            removed = round(1 - macs / total, 4)
            train(task, narrow, DENSE + SEARCH + TUNING, RATE, seed)
            values.setdefault((f"dense, {width} channels wide", removed), []).append(accuracy(task, narrow))
            for method in METHODS:
                reached, left = pruned(wide_task, wide, method, macs, seed)
                assert left <= macs
                values.setdefault((method, removed), []).append(reached)
            print(seed, {name: numbers[-1] for (name, share), numbers in values.items() if share == removed}, flush=True)
    rows = [
        {
            "model": "resnet8",
            "data": "digits",
            "method": method,
            "block": "x".join(map(str, BLOCK)),
            "macs": removed,
            "sparsity": None,
            "protocol": f"{DENSE + SEARCH + TUNING} epochs in total",
            "metric": "accuracy",
            "unit": "share",
            **summary(numbers),
            "dense": summary(dense),
        }
        for (method, removed), numbers in values.items()
    ]
    settings = {"seeds": args.seeds, "widths": args.widths, "threads": 1, "torch": torch.__version__}
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, **settings}, indent=1) + "\n")


def summary(values: list[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": statistics.fmean(values), "std": std, "n": len(values)}


if __name__ == "__main__":
    main()
