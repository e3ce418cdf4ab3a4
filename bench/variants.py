"""Which form of SMART is best on networks and data small enough for a CPU?

python bench/variants.py --data DIR [--network NAME] [--sparsity S | --macs M] [--seeds 0 1 2] [--pictures 10000]
                         [--epochs DENSE SEARCH FINETUNE] [--lr LR] [--variants NAME ... | --ablation] [--transfer]
                         [--crop] [--augment [search|pruning]]
                         [--dense FILE.pt] [--out FILE.json]

CIFAR-10 at 16x16 pixels with 16x8 blocks on one thread; a run takes two to four minutes. The networks are

- residual: a ResNet of width 32;
- folded: the same, with batch norms folded into the convolutions after dense training, like networks from ONNX files;
- densenet: a DenseNet of growth 16;
- plain: convolutions with biases and without normalization;
- transformer: four layers with layer norm.

One dense model is trained first. All variants start from it, with the same epochs, optimizer and schedule. --transfer trains
the dense model on other classes and replaces its last layer. --crop shifts the images in all stages. --augment changes the
images strongly in the search, or in all stages after dense training. Prints the accuracy on 5,000 held-out training images and
the training loss of the last epoch. The test split is not used. A variant that wins here is worth GPU time; the results say
nothing about larger networks.
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

BATCH, BLOCK, HELD_OUT = 64, (16, 8), 5000
BLACK = -1.88  # of a normalized image
PAPER = {"start": 5.0, "end": 1e-3, "follow": False, "reach": None}  # SMART as in the paper, with scores in units of the weights
VARIANTS: dict[str, object] = {
    "gradual": sp.Gradual(),
    "gradual(norm=share)": sp.Gradual(norm="share"),
    "smart": sp.Smart(),
    "smart(gain)": sp.Smart(gain=True),
    "smart(warmup=0.1)": sp.Smart(warmup=0.1),
    "smart(reach=1)": sp.Smart(reach=1.0),
    "plain smart": sp.Smart(**PAPER),
    "plain smart(gain)": sp.Smart(**PAPER, gain=True),
    "plain smart(init=ones)": sp.Smart(**PAPER, init="ones"),
    "plain smart(init=share)": sp.Smart(**PAPER, init="share"),
    "smart(follow, reach=1, start=5, end=0.001)": sp.Smart(reach=1.0, start=5.0, end=1e-3),
    "smart(follow, reach=1, start=2, end=0.01)": sp.Smart(reach=1.0, end=0.01),
    "smart(follow, reach=0.15, start=1, ramp)": sp.Smart(reach=0.15, start=1.0, end=1e-3, ramp="cubic"),
}
ABLATION: dict[str, object] = {  # the options of Table 5 of the paper, one at a time
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
    """Convolutions with biases, ReLU and pooling, without normalization."""
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
    """A pre-norm transformer layer: attention and a perceptron, each with layer norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, tokens, width))
        out: Tensor = x + self.perceptron(self.norms[1](x))
        return out


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, patch: int = 2, side: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2) + self.positions).mean(1))
        return out


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    sparsity: float
    epochs: tuple[int, int, int]  # dense, search, fine-tuning
    lr: float
    pruning_lr: float
    finish: Callable[[nn.Module], nn.Module] = lambda dense: dense  # applied to the trained dense model


def residual() -> nn.Module:
    return ResNet((32, 64, 128, 256), (1, 1, 1, 1), 10, 3)


NETWORKS = {
    "residual": Network(residual, 0.97, (40, 6, 10), 0.1, 0.02),
    "folded": Network(residual, 0.9, (40, 6, 10), 0.1, 0.005, lambda dense: fuse(dense.eval())),
    "densenet": Network(lambda: DenseNet((1, 3, 5, 4), 16, 10, 3), 0.9, (40, 6, 10), 0.1, 0.02),
    "plain": Network(plain, 0.9, (12, 4, 6), 0.02, 0.01),
    "transformer": Network(Transformer, 0.8, (30, 6, 10), 0.05, 0.02),
}


def load_images(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images at half resolution [n, 3, 16, 16], and labels [n]."""
    images, labels = read(folder, split)
    small = F.avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, 2)
    return (small - 0.47) / 0.25, torch.from_numpy(labels).long()


def shift(batch: Tensor, rng: torch.Generator, padding: float) -> Tensor:
    """Shifts each image by up to two pixels in each direction."""
    side, count = batch.shape[-1], len(batch)
    padded = F.pad(batch, (2, 2, 2, 2), value=padding)
    right, down = torch.randint(0, 5, (2, count), generator=rng)
    return torch.stack([padded[i, :, down[i] : down[i] + side, right[i] : right[i] + side] for i in range(count)])


def augment(batch: Tensor, rng: torch.Generator) -> Tensor:
    """Changes contrast and colors, and blanks a square of 4x4 pixels."""
    side, count = batch.shape[-1], len(batch)
    out = batch * (0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=rng))
    out = out + 0.3 * (torch.rand(count, 3, 1, 1, generator=rng) - 0.5)
    right, down = torch.randint(0, side - 3, (2, count), generator=rng)
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
    """Trains and returns the mean loss of the last epoch. The learning rate follows a cosine from step 0 to ``total``."""
    rng_augment = torch.Generator().manual_seed(seed + 7)
    scores = [] if pruner is None else pruner.parameters()
    score_ids = {id(p) for p in scores}
    groups = [{"params": [p for p in model.parameters() if id(p) not in score_ids], "weight_decay": 5e-4}]
    groups += [{"params": scores, "weight_decay": 0.0}] * bool(scores)
    optimizer = torch.optim.SGD(groups, lr, 0.9, nesterov=True)
    rng, (x, y) = torch.Generator().manual_seed(seed), data
    steps, loss = len(x) // BATCH, 0.0
    for _ in range(epochs):
        order, loss = torch.randperm(len(x), generator=rng), 0.0
        for step in range(steps):
            indices = order[step * BATCH : (step + 1) * BATCH]
            flipped = torch.rand(BATCH, generator=rng) < 0.5
            batch = torch.where(flipped[:, None, None, None], x[indices].flip(3), x[indices])
            if crop or augmented:
                batch = shift(batch, rng_augment, BLACK if crop else 0.0)
            batch = augment(batch, rng_augment) if augmented else batch
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / total))
            batch_loss = F.cross_entropy(model(batch), y[indices])
            batch_loss.backward()
            optimizer.step()
            if pruner is not None:
                pruner.step()
            optimizer.zero_grad()
            loss, done = loss + batch_loss.item() / steps, done + 1
    return loss


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    correct = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return correct / len(y)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "(default: depends on the network)"
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", choices=NETWORKS, default="residual")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--sparsity", type=float, help=f"share of blocks to remove {default}")
    budget.add_argument("--macs", type=float, help="share of multiply-accumulates to remove, instead of --sparsity")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, nargs=3, metavar=("DENSE", "SEARCH", "FINETUNE"), help=default.strip("()"))
    parser.add_argument("--lr", type=float, help=f"learning rate of search and fine-tuning {default}")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=(*VARIANTS, *ABLATION), metavar="NAME")
    parser.add_argument("--ablation", action="store_true", help="the options of Table 5 of the paper, instead of --variants")
    parser.add_argument("--transfer", action="store_true", help="train the dense model on five classes, and prune on the others")
    parser.add_argument("--crop", action="store_true", help="shift the images in all stages")
    parser.add_argument(
        "--augment", nargs="?", const="search", choices=("search", "pruning"), help="stages with strong augmentation"
    )
    parser.add_argument("--dense", type=Path, help="the dense model; it is read if the file exists, and written otherwise")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser.parse_args()


@dataclass(frozen=True)
class Job:
    """The arguments with the defaults of the network, and the data."""

    args: argparse.Namespace
    network: Network
    sparsity: float
    epochs: tuple[int, int, int]
    lr: float
    dense_data: tuple[Tensor, Tensor]
    data: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    @property
    def steps(self) -> int:
        return int(self.args.pictures) // BATCH


def make_job(args: argparse.Namespace) -> Job:
    network, count = NETWORKS[args.network], args.pictures
    images, labels = load_images(args.data, "train")
    before = (labels < 5) | (not args.transfer)  # images for the dense model
    after = (labels >= 5) | (not args.transfer)  # images for search and fine-tuning
    return Job(
        args=args,
        network=network,
        sparsity=args.sparsity or network.sparsity,
        epochs=args.epochs or network.epochs,
        lr=args.lr or network.pruning_lr,
        dense_data=(images[before][:count], labels[before][:count]),
        data=(images[after][:count], labels[after][:count]),
        held_out=(images[after][count:][:HELD_OUT], labels[after][count:][:HELD_OUT]),
    )


def make_dense(job: Job) -> nn.Module:
    """The trained dense model, from the file --dense if it exists."""
    path: Path | None = job.args.dense
    torch.manual_seed(0)
    dense = job.network.make()
    if path is not None and path.exists():
        dense.load_state_dict(torch.load(path, weights_only=True))
    else:
        total = job.epochs[0] * job.steps
        loss = train(dense, job.dense_data, job.epochs[0], job.network.lr, 0, 0, total, None, job.args.crop)
        print(f"dense: training loss {loss:.4f}")
        if path is not None:
            torch.save(dense.state_dict(), path)
    dense = job.network.finish(dense)
    print(f"dense {accuracy(dense, *job.held_out):.4f}", flush=True)
    dense.train()
    if job.args.transfer:  # a new last layer for the new classes
        head = [module for module in dense.modules() if isinstance(module, nn.Linear)][-1]
        head.reset_parameters()
    return dense


def run_variant(job: Job, dense: nn.Module, method: object, seed: int) -> tuple[float, float]:
    """Held-out accuracy and training loss of one method and seed."""
    args, (_, search, last) = job.args, job.epochs
    model, total = copy.deepcopy(dense), (search + last) * job.steps
    budget = {"budget": sp.macs(args.macs, example=job.data[0][:1])} if args.macs else {"sparsity": job.sparsity}
    pruner = sp.attach(model, method, block=BLOCK, steps=search * job.steps, **budget)  # type: ignore[arg-type]
    train(model, job.data, search, job.lr, seed, 0, total, pruner, args.crop, args.augment is not None)
    done = search * job.steps
    loss = train(model, job.data, last, job.lr, seed + 100, done, total, None, args.crop, args.augment == "pruning")
    return accuracy(model, *job.held_out), loss


def describe(job: Job) -> dict[str, object]:
    """The columns that all rows share."""
    args, (first, search, last) = job.args, job.epochs
    protocol = f"{first} dense + {search} search + {last} fine-tuning epochs" + ", on other classes" * args.transfer
    protocol += f", lr {job.lr:g}" * (job.lr != job.network.pruning_lr) + ", cropped" * args.crop
    if args.augment:
        protocol += ", search on changed pictures" if args.augment == "search" else ", search and fine-tuning on changed pictures"
    data = f"cifar10 at 16x16, {args.pictures:,} pictures"
    columns: dict[str, object] = {"model": f"{args.network}, small", "data": data, "block": "16x8"}
    return columns | {"sparsity": args.macs or job.sparsity, "protocol": protocol + ", of MACs" * bool(args.macs)}


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    job = make_job(args)
    dense = make_dense(job)
    rows = []
    for name in ABLATION if args.ablation else args.variants:
        results: dict[str, list[float]] = {"accuracy, held out": [], "training loss": []}
        for seed in args.seeds:
            figures = run_variant(job, dense, (VARIANTS | ABLATION)[name], seed)
            print(f"{name:<50} seed {seed}: {figures[0]:.4f}, loss {figures[1]:.4f}", flush=True)
            for values, figure in zip(results.values(), figures, strict=True):
                values.append(figure)
        for metric, values in results.items():
            std = statistics.stdev(values) if len(values) > 1 else None
            row = {"method": name, "metric": metric, "values": values, "mean": statistics.fmean(values), "std": std}
            rows.append({**describe(job), **row, "n": len(values), **({"unit": "share"} if metric.startswith("accuracy") else {})})
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "torch": torch.__version__, "threads": 1}, indent=1) + "\n")


if __name__ == "__main__":
    main()
