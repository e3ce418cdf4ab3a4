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
from pathlib import Path

import torch
from saliency_start import BATCH, accuracy, run, summary
from torch import nn

import smartprune as sp
from smartprune.core.usage import measure
from smartprune.tasks.digits import Digits

WIDTH, BLOCK = 12, (8, 4)
DENSE, SEARCH, TUNING = 30, 40, 30  # epochs
RATE, LATER_RATE = 0.1, 0.05
METHODS = ("smart", "gradual")


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
    run(task, model, SEARCH + TUNING, LATER_RATE, seed, pruner)
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
        run(wide_task, wide, DENSE, RATE, seed)
        dense.append(accuracy(wide_task, wide))
        for width in args.widths:
            task = Digits(width=width)
            torch.manual_seed(seed)
            narrow = task.model("resnet8")
            macs = measure(narrow, example).macs
            removed = round(1 - macs / total, 4)
            run(task, narrow, DENSE + SEARCH + TUNING, RATE, seed)
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


if __name__ == "__main__":
    main()
