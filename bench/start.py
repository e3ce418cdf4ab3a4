"""How much does the first step of a search change the loss of a trained network?

python bench/start.py --data DIR --dense FILE [--model resnet18] [--block 16x8] [--sparsity 0.97 ...] [--out FILE.json]

Prints the loss on 256 training images of CIFAR-10 with batch norms in training mode: dense, and with the first soft mask of
SMART for several temperatures, without and with ``gain``.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import smartprune as sp
from smartprune.tasks.cifar10 import Cifar10

IMAGES = 256
STARTS = (50.0, 5.0, 2.0, 1.0)


@torch.no_grad()
def first_loss(model: nn.Module, task: Cifar10, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    return float(task.loss(model.train(), batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--dense", type=Path, required=True, help="dense.safetensors of a run")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--block", default="16x8")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.5, 0.9, 0.97])
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    task = Cifar10(folder=args.data, limit=10 * IMAGES)
    batch = next(iter(task.data("train", torch.device("cpu")).batches(IMAGES, seed=0, epoch=0)))
    dense = task.model(args.model)
    dense.load_state_dict(load_file(args.dense))
    common = {"model": args.model, "data": f"cifar10, {IMAGES} training pictures", "block": args.block, "metric": "loss", "n": 1}
    rows = []
    for sparsity in args.sparsity:
        losses = {"dense": first_loss(copy.deepcopy(dense), task, batch)}
        for start in STARTS:
            for gain in (False, True):
                model = copy.deepcopy(dense)
                method = sp.Smart(start=start, gain=gain)
                sp.attach(model, method, block=args.block, sparsity=sparsity, steps=100)
                losses[f"smart(start={start:g}{', gain' * gain})"] = first_loss(model, task, batch)
        for method_name, loss in losses.items():
            print(f"{sparsity:<6} {method_name:<24} {loss:.4f}", flush=True)
            row = {"sparsity": sparsity, "protocol": "first step of a search", "method": method_name, "values": [loss]}
            rows.append({**common, **row, "mean": loss, "std": None})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
