"""Which form of SMART is best on a network and data small enough for a CPU?

python bench/variants.py --data DIR [--sparsity 0.97] [--seeds 0 1 2] [--pictures 10000] [--epochs 15 6 10] [--out FILE.json]

A residual network of width 32 on CIFAR-10 at 16x16 pixels, 16x8 blocks, one thread, some four minutes a run. One dense model is
trained first; all variants start from it, with the same epochs, optimizer and schedule. Test accuracy and training loss of the
last epoch. What wins here is worth GPU time; it is no claim about larger networks.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from smartprune.models.resnet import ResNet
from smartprune.tasks.cifar10_files import read

BATCH, BLOCK = 64, (16, 8)
VARIANTS: dict[str, object] = {
    "gradual": sp.Gradual(),
    "gradual(norm=share)": sp.Gradual(norm="share"),
    "smart": sp.Smart(),
    "smart(follow)": sp.Smart(follow=True),
    "smart(follow, reach=0.03)": sp.Smart(follow=True, reach=0.03),
    "smart(follow, reach=0.1)": sp.Smart(follow=True, reach=0.1),
    "smart(follow, reach=0.5)": sp.Smart(follow=True, reach=0.5),
    "smart(follow, reach=0.5, share)": sp.Smart(follow=True, reach=0.5, init="share"),
    "smart(follow, reach=0.05, ramp)": sp.Smart(follow=True, reach=0.05, ramp="cubic", start=0.5),
    "smart(follow, reach=0.5, ramp)": sp.Smart(follow=True, reach=0.5, ramp="cubic", start=0.5),
    "smart(follow, reach=0.05, ramp, share)": sp.Smart(follow=True, reach=0.05, ramp="cubic", start=0.5, init="share"),
}


def pictures(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """At half size, [n, 3, 16, 16]."""
    found, labels = read(folder, part)
    small = F.avg_pool2d(torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255, 2)
    return (small - 0.47) / 0.25, torch.from_numpy(labels).long()


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    epochs: int,
    lr: float,
    seed: int,
    done: int,
    total: int,
    pruner: sp.Pruner | None,
) -> float:
    """The mean loss of the last epoch. The learning rate follows one cosine from step 0 to ``total``."""
    scores = [] if pruner is None else pruner.parameters()
    own = {id(p) for p in scores}
    groups = [{"params": [p for p in model.parameters() if id(p) not in own], "weight_decay": 5e-4}]
    groups += [{"params": scores, "weight_decay": 0.0}] * bool(scores)
    optimizer = torch.optim.SGD(groups, lr, 0.9, nesterov=True)
    draw, (x, y) = torch.Generator().manual_seed(seed), data
    steps, loss = len(x) // BATCH, 0.0
    for _ in range(epochs):
        order, loss = torch.randperm(len(x), generator=draw), 0.0
        for step in range(steps):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            mirrored = torch.rand(BATCH, generator=draw) < 0.5
            batch = torch.where(mirrored[:, None, None, None], x[chosen].flip(3), x[chosen])
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / total))
            found = F.cross_entropy(model(batch), y[chosen])
            found.backward()
            optimizer.step()
            if pruner is not None:
                pruner.step()
            optimizer.zero_grad()
            loss, done = loss + found.item() / steps, done + 1
    return loss


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return right / len(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sparsity", type=float, default=0.97)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, nargs=3, default=[15, 6, 10], metavar=("DENSE", "SEARCH", "FINETUNE"))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = (part[: args.pictures] for part in pictures(args.data, "train"))
    test, steps = pictures(args.data, "test"), args.pictures // BATCH
    first, search, last = args.epochs
    torch.manual_seed(0)
    dense = ResNet((32, 64, 128, 256), (1, 1, 1, 1), 10, 3)
    train(dense, (x, y), first, 0.1, 0, 0, first * steps, None)
    print(f"dense {accuracy(dense, *test):.4f}", flush=True)
    dense.train()
    protocol = f"{first} dense + {search} search + {last} fine-tuning epochs"
    common = {"model": "residual network, width 32", "data": f"cifar10 at 16x16, {args.pictures:,} pictures", "block": "16x8"}
    common |= {"sparsity": args.sparsity, "protocol": protocol}
    rows = []
    for name in args.variants:
        found: dict[str, list[float]] = {"accuracy": [], "training loss": []}
        for seed in args.seeds:
            model, total = copy.deepcopy(dense), (search + last) * steps
            pruner = sp.attach(model, VARIANTS[name], block=BLOCK, sparsity=args.sparsity, steps=search * steps)  # type: ignore[arg-type]
            train(model, (x, y), search, 0.02, seed, 0, total, pruner)
            found["training loss"].append(train(model, (x, y), last, 0.02, seed + 100, search * steps, total, None))
            found["accuracy"].append(accuracy(model, *test))
            print(f"{name:<40} seed {seed}: {found['accuracy'][-1]:.4f}, loss {found['training loss'][-1]:.4f}", flush=True)
        for metric, values in found.items():
            std = statistics.stdev(values) if len(values) > 1 else None
            row = {"method": name, "metric": metric, "values": values, "mean": statistics.fmean(values), "std": std}
            rows.append({**common, **row, "n": len(values), **({"unit": "share"} if metric == "accuracy" else {})})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "threads": 1}, indent=1) + "\n")


if __name__ == "__main__":
    main()
