"""Do the layers of a trained network show how many blocks each of them should keep?

python bench/balance.py --data DIR --dense FILE [--model resnet18] [--block 16x8] [--sparsity 0.97] [--batches 12] [--out FILE.json]

Measures two quantities on batches of 128 augmented training images of CIFAR-10, with batch norms in training mode:

- How well gradients predict the weight norm of a layer. Before a batch norm, SGD steps increase the norm and weight decay
  reduces it. They balance where |w|^2 is proportional to |w| |gradient|. Printed are the correlation of the logarithms over
  the layers, and the slope.
- How much of the score gradient at the first search step moves blocks between layers: |sum| / sum of |.| over a layer, as the
  median over the layers. Independent values with random signs would give about 0.8 / sqrt(blocks of the layer), which is
  printed, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import smartprune as sp
from smartprune.tasks.cifar10 import Cifar10

BATCH = 128
Batches = list[tuple[Tensor, Tensor]]


def balance(model: nn.Module, names: list[tuple[str, str]], task: Cifar10, batches: Batches) -> tuple[float, float]:
    """Correlation and slope of log |w|^2 against log(|w| |gradient|) over the layers."""
    weights = [getattr(model.get_submodule(module), name) for module, name in names]
    squares = torch.zeros(len(weights), dtype=torch.float64)
    for batch in batches:
        model.zero_grad()
        task.loss(model.train(), batch).backward()
        squares += torch.stack([weight.grad.square().sum().double() for weight in weights]) / len(batches)
    sizes = torch.stack([weight.detach().square().sum().double() for weight in weights])
    size, gradient = sizes.log(), (sizes * squares).log() / 2
    slope = ((size - size.mean()) * (gradient - gradient.mean())).sum() / (gradient - gradient.mean()).square().sum()
    return float(torch.corrcoef(torch.stack((size, gradient)))[0, 1]), float(slope)


def between_layers(pruner: sp.Pruner, model: nn.Module, task: Cifar10, batches: Batches) -> tuple[float, float]:
    """Median over layers of |sum| / sum of |.| of the score gradients, and its value for random signs."""
    (scores,) = pruner.parameters()
    for batch in batches:  # without optimizer steps, so the gradients add up at one point
        task.loss(model.train(), batch).backward()
    assert scores.grad is not None
    blocks = pruner.blocks
    net = blocks.per_layer(scores.grad).abs() / blocks.per_layer(scores.grad.abs()).clamp(min=1e-30)
    return float(net.median()), statistics.median(0.8 / layer.n**0.5 for layer in blocks.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--dense", type=Path, required=True, help="dense.safetensors of a run")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--block", default="16x8")
    parser.add_argument("--sparsity", type=float, default=0.97)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    task = Cifar10(folder=args.data, limit=args.batches * BATCH)
    batches = list(task.data("train", torch.device("cpu")).batches(BATCH, seed=0, epoch=0))[: args.batches]
    dense = task.model(args.model)
    dense.load_state_dict(load_file(args.dense))
    searched = copy.deepcopy(dense)
    pruner = sp.attach(searched, sp.Smart(gain=True), block=args.block, sparsity=args.sparsity, steps=100)
    correlation, slope = balance(dense, [layer.sites[0] for layer in pruner.blocks.layers], task, batches)
    net, random = between_layers(pruner, searched, task, batches)
    figures = {
        "weights and gradients of layers: correlation": correlation,
        "weights and gradients of layers: slope": slope,
        "score gradient between layers: share": net,
        "score gradient between layers: random signs": random,
    }
    rows = []
    for metric, value in figures.items():
        print(f"{args.model:<14}{metric:<46}{value:.3f}")
        row = {"model": args.model, "block": args.block, "protocol": "trained", "method": metric, "metric": "value", "n": 1}
        row |= {"data": f"cifar10, {len(batches)} batches of {BATCH}", "sparsity": args.sparsity}
        rows.append({**row, "values": [value], "mean": value, "std": None})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
