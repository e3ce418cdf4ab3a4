"""Which form of SMART is best on networks and data small enough for a CPU?

python bench/variants.py --data DIR [--network NAME] [--sparsity S | --macs M] [--seeds 0 1 2] [--pictures 10000]
                         [--epochs DENSE SEARCH FINETUNE] [--lr LR] [--variants NAME ... | --ablation] [--transfer]
                         [--crop] [--augment [search|pruning]]
                         [--dense FILE.pt] [--out FILE.json]

CIFAR-10 at 16x16 pixels, 16x8 blocks, one thread, two to four minutes a run. The networks: residual, of width 32; folded, the
same with its batch norms folded into the convolutions once the dense model is trained, as networks arrive from ONNX files;
densenet, of growth 16; plain, convolutions with biases and nothing that normalises; transformer, four layers with layer norm.
One dense model is trained first; all variants start from it, with the same epochs, optimizer and schedule. With --transfer it
has seen other classes, and gets a new last layer; with --crop the pictures of all stages are moved about, and with --augment
the search, or all that comes after the dense training, is shown strongly changed ones. Accuracy on 5,000 training pictures
that were held out, and training loss of the last epoch; the test split is not read. What wins here is worth GPU time; it is
no claim about larger networks.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

import smartprune as sp
from smartprune.models.densenet import DenseNet
from smartprune.models.resnet import ResNet
from smartprune.tasks.cifar10_files import read

BATCH, BLOCK, HELD = 64, (16, 8), 5000
BLACK = -1.88  # of a picture as the networks see it
PLAIN = {"start": 5.0, "end": 1e-3, "follow": False, "reach": None}  # SMART as the paper has it, in units of the model's weights
VARIANTS: dict[str, object] = {
    "gradual": sp.Gradual(),
    "gradual(norm=share)": sp.Gradual(norm="share"),
    "smart": sp.Smart(),
    "smart(gain)": sp.Smart(gain=True),
    "smart(warmup=0.1)": sp.Smart(warmup=0.1),
    "smart(reach=1)": sp.Smart(reach=1.0),
    "plain smart": sp.Smart(**PLAIN),
    "plain smart(gain)": sp.Smart(**PLAIN, gain=True),
    "plain smart(init=ones)": sp.Smart(**PLAIN, init="ones"),
    "plain smart(init=share)": sp.Smart(**PLAIN, init="share"),
    "smart(follow, reach=1, start=5, end=0.001)": sp.Smart(reach=1.0, start=5.0, end=1e-3),
    "smart(follow, reach=1, start=2, end=0.01)": sp.Smart(reach=1.0, end=0.01),
    "smart(follow, reach=0.15, start=1, ramp)": sp.Smart(reach=0.15, start=1.0, end=1e-3, ramp="cubic"),
}
ABLATION: dict[str, object] = {  # the switches of the paper's Table 5, one at a time
    "smart": sp.Smart(),
    "smart(mask_type=stochastic)": sp.Smart(mask_type="stochastic"),
    "smart(mask_type=binary)": sp.Smart(mask_type="binary"),
    "smart(mask_type=binary_soft)": sp.Smart(mask_type="binary_soft"),
    "smart(start=1, schedule=fixed)": sp.Smart(start=1.0, schedule="fixed"),
    "smart(start=0.1, schedule=fixed)": sp.Smart(start=0.1, schedule="fixed"),
    "smart(start=0.01, schedule=fixed)": sp.Smart(start=0.01, schedule="fixed"),
    "smart(schedule=linear)": sp.Smart(schedule="linear"),
    "smart(schedule=inverse_exponential)": sp.Smart(schedule="inverse_exponential"),
    "smart(start=1)": sp.Smart(start=1.0),
    "smart(start=10)": sp.Smart(start=10.0),
    "smart(start=50)": sp.Smart(start=50.0),
    "smart(end=0.01)": sp.Smart(end=0.01),
    "smart(end=0.0001)": sp.Smart(end=1e-4),
    "smart(end=1e-05)": sp.Smart(end=1e-5),
    "smart(init=ones)": sp.Smart(init="ones"),
    "smart(train_weights=False)": sp.Smart(train_weights=False),
}


def plain() -> nn.Module:
    """Convolutions with biases, ReLU and pooling, nothing that normalises."""
    layers: list[nn.Module] = []
    for inputs, outputs, halve in ((3, 32, 0), (32, 64, 1), (64, 128, 0), (128, 128, 1), (128, 256, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * halve]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10))
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return net


class Layer(nn.Module):
    """Attention and a perceptron, layer norm before each, what they give added to what they got."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, places, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, places, width))
        out: Tensor = x + self.perceptron(self.norms[1](x))
        return out


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, patch: int = 2, side: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2) + self.places).mean(1))
        return out


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    sparsity: float
    epochs: tuple[int, int, int]  # dense, search, fine-tuning
    lr: float
    pruning_lr: float
    finish: Callable[[nn.Module], nn.Module] = lambda dense: dense  # of the trained dense model


def residual() -> nn.Module:
    return ResNet((32, 64, 128, 256), (1, 1, 1, 1), 10, 3)


NETWORKS = {
    "residual": Network(residual, 0.97, (40, 6, 10), 0.1, 0.02),
    "folded": Network(residual, 0.9, (40, 6, 10), 0.1, 0.005, lambda dense: fuse(dense.eval())),
    "densenet": Network(lambda: DenseNet((1, 3, 5, 4), 16, 10, 3), 0.9, (40, 6, 10), 0.1, 0.02),
    "plain": Network(plain, 0.9, (12, 4, 6), 0.02, 0.01),
    "transformer": Network(Transformer, 0.8, (30, 6, 10), 0.05, 0.02),
}


def pictures(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """At half size, [n, 3, 16, 16]."""
    found, labels = read(folder, part)
    small = F.avg_pool2d(torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255, 2)
    return (small - 0.47) / 0.25, torch.from_numpy(labels).long()


def moved(batch: Tensor, draw: torch.Generator, around: float) -> Tensor:
    """By up to two pixels each way."""
    side, count = batch.shape[-1], len(batch)
    wide = F.pad(batch, (2, 2, 2, 2), value=around)
    right, down = torch.randint(0, 5, (2, count), generator=draw)
    return torch.stack([wide[i, :, down[i] : down[i] + side, right[i] : right[i] + side] for i in range(count)])


def augment(batch: Tensor, draw: torch.Generator) -> Tensor:
    """With other contrast and colours, and a square of 4x4 pixels blank."""
    side, count = batch.shape[-1], len(batch)
    out = batch * (0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=draw))
    out = out + 0.3 * (torch.rand(count, 3, 1, 1, generator=draw) - 0.5)
    right, down = torch.randint(0, side - 3, (2, count), generator=draw)
    for i in range(count):
        out[i, :, down[i] : down[i] + 4, right[i] : right[i] + 4] = 0
    return out


def train(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    epochs: int,
    lr: float,
    seed: int,
    done: int,
    total: int,
    pruner: sp.Pruner | None,
    crop: bool = False,
    augmented: bool = False,
) -> float:
    """The mean loss of the last epoch. The learning rate follows one cosine from step 0 to ``total``."""
    other = torch.Generator().manual_seed(seed + 7)
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
            if crop or augmented:
                batch = moved(batch, other, BLACK if crop else 0.0)
            batch = augment(batch, other) if augmented else batch
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
    parser.add_argument("--network", choices=NETWORKS, default="residual")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--sparsity", type=float, help="share of blocks to remove; else what suits the network")
    budget.add_argument("--macs", type=float, help="share of multiply-accumulates to remove, in place of --sparsity")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, nargs=3, metavar=("DENSE", "SEARCH", "FINETUNE"), help="else what suits the network")
    parser.add_argument("--lr", type=float, help="learning rate of search and fine-tuning; else what suits the network")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=(*VARIANTS, *ABLATION), metavar="NAME")
    parser.add_argument("--ablation", action="store_true", help="in place of --variants: the switches of the paper's Table 5")
    parser.add_argument(
        "--transfer", action="store_true", help="dense on five of the classes, search and fine-tuning on the others"
    )
    parser.add_argument("--crop", action="store_true", help="move the pictures of all stages about")
    parser.add_argument(
        "--augment", nargs="?", const="search", choices=("search", "pruning"), help="where pictures are strongly changed"
    )
    parser.add_argument("--dense", type=Path, help="the trained dense model: read where the file exists, else written")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    network = NETWORKS[args.network]
    sparsity, (first, search, last) = args.sparsity or network.sparsity, args.epochs or network.epochs
    lr = args.lr or network.pruning_lr
    found, labels = pictures(args.data, "train")
    before = (labels < 5) | (not args.transfer)  # pictures for the dense model, and for what comes after
    after = (labels >= 5) | (not args.transfer)
    first_x, first_y = found[before][: args.pictures], labels[before][: args.pictures]
    x, y = found[after][: args.pictures], labels[after][: args.pictures]
    held = found[after][args.pictures :][:HELD], labels[after][args.pictures :][:HELD]
    steps = args.pictures // BATCH
    torch.manual_seed(0)
    dense = network.make()
    if args.dense is not None and args.dense.exists():
        dense.load_state_dict(torch.load(args.dense, weights_only=True))
    else:
        loss = train(dense, (first_x, first_y), first, network.lr, 0, 0, first * steps, None, args.crop)
        print(f"dense: training loss {loss:.4f}")
        if args.dense is not None:
            torch.save(dense.state_dict(), args.dense)
    dense = network.finish(dense)
    print(f"dense {accuracy(dense, *held):.4f}", flush=True)
    dense.train()
    if args.transfer:  # its last layer knows nothing of the new classes
        head = [module for module in dense.modules() if isinstance(module, nn.Linear)][-1]
        head.reset_parameters()
    protocol = f"{first} dense + {search} search + {last} fine-tuning epochs" + ", on other classes" * args.transfer
    protocol += f", lr {lr:g}" * (lr != network.pruning_lr) + ", cropped" * args.crop
    protocol += {None: "", "search": ", search on changed pictures", "pruning": ", search and fine-tuning on changed pictures"}[
        args.augment
    ]
    common = {"model": f"{args.network}, small", "data": f"cifar10 at 16x16, {args.pictures:,} pictures", "block": "16x8"}
    common |= {"sparsity": args.macs or sparsity, "protocol": protocol + ", of MACs" * bool(args.macs)}
    rows = []
    every = VARIANTS | ABLATION
    for name in ABLATION if args.ablation else args.variants:
        got: dict[str, list[float]] = {"accuracy, held out": [], "training loss": []}
        for seed in args.seeds:
            model, total = copy.deepcopy(dense), (search + last) * steps
            asked = {"budget": sp.macs(args.macs, example=x[:1])} if args.macs else {"sparsity": sparsity}
            pruner = sp.attach(model, every[name], block=BLOCK, steps=search * steps, **asked)  # type: ignore[arg-type]
            train(model, (x, y), search, lr, seed, 0, total, pruner, args.crop, args.augment is not None)
            loss = train(model, (x, y), last, lr, seed + 100, search * steps, total, None, args.crop, args.augment == "pruning")
            right = accuracy(model, *held)
            print(f"{name:<50} seed {seed}: {right:.4f}, loss {loss:.4f}", flush=True)
            got["accuracy, held out"].append(right)
            got["training loss"].append(loss)
        for metric, values in got.items():
            std = statistics.stdev(values) if len(values) > 1 else None
            row = {"method": name, "metric": metric, "values": values, "mean": statistics.fmean(values), "std": std}
            rows.append({**common, **row, "n": len(values), **({"unit": "share"} if metric.startswith("accuracy") else {})})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "threads": 1}, indent=1) + "\n")


if __name__ == "__main__":
    main()
