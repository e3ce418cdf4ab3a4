"""How accurate is pruning without training, next to magnitude and to a simple form of optimal brain surgeon?

python bench/oneshot.py --data DIR --weights FILE.pt --train MINUTES [--width 16]    trains a ResNet18 of that width first
python bench/oneshot.py --data DIR --weights FILE.pt [--sparsities 0.5 0.7 0.8 0.9] [--methods NAME ...] [--out FILE.json]
                        [--split test | validation] [--images 2000] [--calibration 512] [--record NAME --note TEXT]
python bench/oneshot.py --speed MODEL --input 3x224x224 [--calibration 256] [--batch 16] [--memory 4] [--threads 2]
                        [--device cuda] [--out FILE.json]

A ResNet18 on CIFAR-10 with 16x8 blocks. The last 2,000 training images are held out: settings were chosen on them, with
--split validation. The methods are

- magnitude, and magnitude with new batch-norm statistics (sp.recalibrate);
- simple: a greedy order of removal per group of rows in float64, one block at a time, all increments sorted together, and a least
  squares refit of the kept columns on the inputs of the network that is pruned so far; also with new statistics;
- prune: sp.prune.

All get the same calibration images, without labels. --speed prints seconds and peak memory of sp.prune on a network with random
weights and random images: processor time is what a shared machine can tell. Training follows the clock, so its result depends on
the machine: the record names the weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models.resnet import ResNet
from smartprune.tasks.cifar10 import Cifar10

ROOT = Path(__file__).parents[1]
BLOCK, HELD_OUT, BATCH = (16, 8), 2000, 64
METHODS = ("magnitude", "magnitude, new statistics", "simple", "simple, new statistics", "prune")
Mask = dict[str, Tensor]  # weight name -> bool, in the shape of the weight


def network(width: int) -> nn.Module:
    return ResNet(tuple(width * i for i in (1, 2, 4, 8)), (2, 2, 2, 2), 10, 3)


def images(data: str, split: str, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The first batches of a split, without augmentation."""
    source = Cifar10(folder=data, holdout=HELD_OUT).data("train" if split == "train" else split, torch.device("cpu")).still()
    out = []
    for x, y in source.batches(size, 0, 0):
        out.append((x.contiguous(), y))
        if size * len(out) >= count:
            break
    return out


def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / sum(len(y) for _, y in batches)


def train(args: argparse.Namespace) -> None:
    """One cycle of the learning rate over the given minutes."""
    torch.manual_seed(0)
    task, device = Cifar10(folder=args.data, holdout=HELD_OUT), torch.device("cpu")
    data, model = task.data("train", device), network(args.width).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    began, step, epoch, progress = time.time(), 0, 0, 0.0
    while progress < 1:
        for x, y in data.batches(128, 0, epoch):
            progress = (time.time() - began) / 60 / args.train
            optimizer.param_groups[0]["lr"] = max(0.0, 0.2 * min(progress / 0.25, (1 - progress) / 0.75))
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if progress >= 1:
                break
        epoch += 1
        torch.save(model.state_dict(), args.weights)
    print(json.dumps({"steps": step, "validation": accuracy(model, images(args.data, "validation", HELD_OUT, 500))}))


# -- the simple form ----------------------------------------------------------------------------------------------------------


def inputs_of(model: nn.Module, name: str, batches: list[Tensor]) -> list[Tensor]:
    """The unfolded inputs of one convolution, float64 [rows, inputs] per batch."""
    conv, out = model.get_submodule(name), []

    def read(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        columns = F.unfold(args[0], module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        out.append(columns.transpose(1, 2).reshape(-1, columns.shape[1]).double())

    hook = conv.register_forward_pre_hook(read)
    with torch.no_grad():
        for x in batches:
            model(x)
    hook.remove()
    return out


def second_moment(rows: list[Tensor]) -> Tensor:
    total = sum(x.T @ x for x in rows)
    assert isinstance(total, Tensor)
    return total / sum(map(len, rows))


def row_weights(model: nn.Module, names: list[str], batches: list[Tensor]) -> dict[str, Tensor]:
    """The sum over positions of the mean squared gradient at each output, of the loss with labels drawn from the outputs."""
    totals: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)

    def watch(name: str) -> Any:
        def read(module: nn.Module, args: Any, out: Tensor) -> None:
            def add(grad: Tensor) -> None:
                totals[name] = totals.get(name, 0) + grad.double().square().sum((0, 2, 3))

            out.register_hook(add)

        return read

    hooks = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    for x in batches:
        out = model(x)
        labels = torch.multinomial(out.detach().softmax(1), 1, generator=generator)[:, 0]
        F.cross_entropy(out, labels, reduction="sum").backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return totals


def greedy_costs(weight: Tensor, moment: Tensor, rows: Tensor) -> Tensor:
    """What each removal adds, in the shape of the weight: one block after the other, with exact updates in float64."""
    outputs, channels, *kernel = weight.shape
    taps = kernel[0] * kernel[1]
    flat, costs = weight.double().flatten(1), torch.zeros(outputs, channels * taps, dtype=torch.float64)
    groups = [
        [channel * taps + tap for channel in range(first, min(first + BLOCK[1], channels))]
        for first in range(0, channels, BLOCK[1])
        for tap in range(taps)
    ]
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    start = torch.linalg.inv(damped)
    for first in range(0, outputs, BLOCK[0]):
        block = slice(first, first + BLOCK[0])
        w, inverse, scale = flat[block].clone(), start.clone(), rows[block]
        left, highest = list(range(len(groups))), 0.0
        while left:
            index = torch.tensor([groups[i] for i in left])
            block_inverse = inverse[index[:, :, None], index[:, None]]
            parts = w[:, index].permute(1, 2, 0)
            values = (parts * torch.linalg.solve(block_inverse, parts)).sum(1) @ scale
            at = int(values.argmin())
            highest = max(highest, float(values[at]))
            chosen = groups[left.pop(at)]
            costs[block, chosen] = highest
            inner = torch.linalg.solve(inverse[chosen][:, chosen], inverse[chosen])
            w -= w[:, chosen] @ inner
            inverse -= inverse[:, chosen] @ inner
    return costs.view_as(weight)


def simple_costs(model: nn.Module, plan: sp.Plan, batches: list[Tensor]) -> Mask:
    names = [layer.name for layer in plan.layers]
    weights = row_weights(model, names, batches)
    return {
        layer.weight: greedy_costs(
            model.get_parameter(layer.weight).detach(), second_moment(inputs_of(model, layer.name, batches)), weights[layer.name]
        )
        for layer in plan.layers
    }


def simple_refit(model: nn.Module, plan: sp.Plan, masks: Mask, batches: list[Tensor]) -> None:
    dense = copy.deepcopy(model)
    with torch.no_grad():
        for layer in plan.layers:
            model.get_parameter(layer.weight).mul_(masks[layer.weight])
    for layer in plan.layers:
        moment = second_moment(inputs_of(model, layer.name, batches))
        moment = moment + 1e-3 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
        old, kept = dense.get_parameter(layer.weight).detach().double().flatten(1), masks[layer.weight].flatten(1)
        new = torch.zeros_like(old)
        for first in range(0, len(old), BLOCK[0]):
            rows = slice(first, first + BLOCK[0])
            columns = kept[first].nonzero()[:, 0]
            if len(columns):
                goal = moment[columns] @ old[rows].T
                new[rows, columns] = torch.linalg.solve(moment[columns][:, columns], goal).T
        with torch.no_grad():
            weight = model.get_parameter(layer.weight)
            weight.copy_(new.view_as(weight))


def spread(plan: sp.Plan, mask: Tensor) -> Mask:
    return {layer.weight: layer.grid.expand(mask[layer.start : layer.stop]) for layer in plan.layers}


def choose(plan: sp.Plan, costs: Mask) -> Mask:
    values = torch.cat([layer.grid.mean(costs[layer.weight]) for layer in plan.layers])
    assert plan.limit is not None
    return spread(plan, sp.hard_topk(values.clamp(min=1e-30).log(), plan.limit))


# -- the comparison -----------------------------------------------------------------------------------------------------------


class Bench:
    """One network, its data, and what is computed once for all sparsities."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.dense = network(args.width).eval()
        self.dense.load_state_dict(torch.load(args.weights, weights_only=True))
        self.calibration = [x for x, _ in images(args.data, "train", args.calibration, BATCH)]
        self.test = images(args.data, args.split, args.images, 500)
        self.costs: Mask | None = None

    def plan(self, sparsity: float) -> sp.Plan:
        return sp.plan(self.dense, BLOCK, sparsity, example=self.calibration[0][:1])

    def run(self, method: str, sparsity: float) -> nn.Module:
        model = copy.deepcopy(self.dense)
        kind, _, statistics = method.partition(", ")
        if kind == "magnitude":
            pruner = sp.attach(model, "magnitude", BLOCK, sparsity, steps=1, example=self.calibration[0][:1])
            pruner.freeze()
            sp.bake(model, hold=False)
        elif kind == "simple":
            plan = self.plan(sparsity)
            self.costs = simple_costs(model, plan, self.calibration) if self.costs is None else self.costs
            simple_refit(model, plan, choose(plan, self.costs), self.calibration)
        else:
            sp.prune(model, self.calibration, BLOCK, sparsity)
        if statistics:
            sp.recalibrate(model, self.calibration)
        return model


def compare(args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args)
    dense = accuracy(bench.dense, bench.test)
    print(f"dense {dense:.4f}, {sum(len(y) for _, y in bench.test)} images of {args.split}", flush=True)
    rows = []
    for method in args.methods:
        for sparsity in args.sparsities:
            began = time.perf_counter()
            value = accuracy(bench.run(method, sparsity), bench.test)
            print(f"{method:28} {sparsity:.2f}  {value:.4f}  {time.perf_counter() - began:6.1f} s", flush=True)
            rows.append(
                {
                    "model": f"resnet18 of width {args.width}",
                    "data": f"cifar10, {len(bench.calibration) * BATCH} images without labels",
                    "method": method,
                    "block": "16x8",
                    "sparsity": sparsity,
                    "protocol": "no training",
                    "metric": f"accuracy, {args.images} images of {args.split}",
                    "values": [value],
                    "mean": value,
                    "std": None,
                    "n": 1,
                    "unit": "share",
                    "dense": {"values": [dense], "mean": dense, "std": None, "n": 1},
                }
            )
    return {"rows": rows}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times sp.prune. Steps are cumulative seconds of wall time at the end of each step."""
    from smartprune.models import build

    shape = [int(size) for size in args.input.split("x")]
    torch.manual_seed(0)
    model = build(args.speed).eval().to(args.device)
    batches = [torch.randn(args.batch, *shape) for _ in range(args.calibration // args.batch)]
    before, began, steps = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter(), {}

    def progress(step: str, done: int, total: int) -> None:
        steps[step] = round(time.perf_counter() - began, 1)

    processor = time.process_time()
    sp.prune(model, batches, BLOCK, args.sparsities[0], memory=args.memory, progress=progress)
    if args.device == "cuda":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter() - began, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(steps))
    memory = f"{peak / 2**20:.2f} GiB at most ({before / 2**20:.2f} before)"
    print(f"{args.speed}: {wall:.1f} s, {processor:.1f} s of processor time, {memory}")
    values = {"wall time": (wall, "s"), "processor time": (processor, "s"), "peak memory": (peak / 2**20, "GiB")}
    common = {
        "model": args.speed,
        "data": f"{args.calibration} random images of {args.input}",
        "method": "prune",
        "block": "16x8",
        "sparsity": args.sparsities[0],
        "protocol": f"batches of {args.batch}, {args.threads} threads, {args.device}, memory={args.memory:g}",
    }
    rows = [
        {**common, "metric": name, "unit": unit, "values": [value], "mean": value, "std": None, "n": 1}
        for name, (value, unit) in values.items()
    ]
    return {"rows": rows, "steps": steps, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--train", type=float, metavar="MINUTES")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--calibration", type=int, default=512)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--speed", metavar="MODEL")
    parser.add_argument("--memory", type=float, default=4.0, help="GiB, for --speed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for --speed")
    parser.add_argument("--input", metavar="SHAPE", default="3x32x32")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--record", metavar="NAME")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.train:
        return train(args)
    result = measure(args) if args.speed else compare(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.record:
        settings = {key: str(value) for key, value in vars(args).items() if key not in ("data", "out", "record", "note")}
        command = f"python bench/oneshot.py {f'--speed {args.speed}' if args.speed else '--data DIR --weights FILE.pt'}"
        machine = f"{args.threads} thread, torch {torch.__version__}"
        save_record(ROOT / "records" / args.record, result, settings, args.note, [command], [machine])
    return None


if __name__ == "__main__":
    main()
