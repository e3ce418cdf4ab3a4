"""Is a short search better when its scores start from saliencies instead of magnitudes?

python bench/saliency_start.py [--seeds 3] [--lengths 3+7 12+48] [--sparsity 0.97] [--out FILE.json]

Digits, resnet8, blocks of 8x4. Per seed, one dense network is trained for 30 epochs. Every method starts from it, searches and
fine-tunes. Saliencies are those of sp.saliencies on 512 training images without labels. one shot is sp.prune,
then fine-tuning alone.
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
from smartprune.tasks.digits import Digits

BLOCK, BATCH, DENSE = (8, 4), 64, 30
METHODS = ("smart", "smart, from saliencies", "gradual", "one shot")


def run(task: Digits, model: nn.Module, epochs: int, rate: float, seed: int, pruner: sp.Pruner | None = None) -> None:
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


def prune(task: Digits, dense: nn.Module, method: str, sparsity: float, search: int, tuning: int, seed: int) -> float:
    model = copy.deepcopy(dense)
    batches = list(task.data("train", torch.device("cpu")).batches(BATCH, seed, 0))
    images = [x for x, _ in batches]
    if method == "one shot":
        sp.prune(model, images, BLOCK, sparsity, samples=512)
        run(task, model, search + tuning, 0.05, seed)
        return accuracy(task, model)
    start = sp.saliencies(model, images, BLOCK, samples=512) if "saliencies" in method else None
    steps = search * len(batches)
    pruner = sp.attach(model, method.split(",")[0], BLOCK, sparsity, steps=steps, example=images[0][:1], start=start)
    run(task, model, search + tuning, 0.05, seed, pruner)
    sp.bake(model)
    return accuracy(task, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", default=["3+7", "12+48"])
    parser.add_argument("--sparsity", type=float, default=0.97)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = Digits()
    values: dict[tuple[str, str], list[float]] = {}
    dense: list[float] = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        network = task.model("resnet8")
        run(task, network, DENSE, 0.1, seed)
        dense.append(accuracy(task, network))
        for length in args.lengths:
            search, tuning = map(int, length.split("+"))
            for method in METHODS:
                values.setdefault((length, method), []).append(prune(task, network, method, args.sparsity, search, tuning, seed))
                print(seed, length, f"{method:24} {values[length, method][-1]:.4f}", flush=True)
    rows = [
        {
            "model": "resnet8",
            "data": "digits",
            "method": method,
            "block": "8x4",
            "sparsity": args.sparsity,
            "protocol": f"{DENSE} dense + {length.replace('+', ' search + ')} fine-tuning epochs",
            "metric": "accuracy",
            "unit": "share",
            **summary(numbers),
            "dense": summary(dense),
        }
        for (length, method), numbers in values.items()
    ]
    settings = {"seeds": args.seeds, "lengths": args.lengths, "threads": 1, "torch": torch.__version__}
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, **settings}, indent=1) + "\n")


def summary(values: list[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"values": values, "mean": statistics.fmean(values), "std": std, "n": len(values)}


if __name__ == "__main__":
    main()
