"""How accurate are trained networks of several kinds after pruning without training, next to one-shot magnitude?

python bench/oneshot_networks.py --data DIR --out DIR --plan gpu                 trains and prunes every network of the plan
python bench/oneshot_networks.py --data DIR --out DIR --plan cpu --only vit_narrow --seeds 0 --split validation
python bench/oneshot_networks.py --out DIR --plan gpu --record NAME --note TEXT   writes a record of the cells in --out

--data holds the folders cifar10, bccd and camvid. Per network and seed, a dense network is trained by ``smartprune train
--dense-only`` with the settings of the plan. Then every method removes blocks at every sparsity, with the same 512 training
inputs without labels:

- magnitude, and magnitude with new batch-norm statistics (sp.recalibrate), where the network has any;
- prune: sp.prune;
- prune, plain costs (with --methods): sp.prune with costs that do not grow as a layer is emptied.

The dense trainings and every finished cell, a line of cells.jsonl, are kept: the same command continues where it stopped, for
example after --seconds. Detections are kept until a package that scores them is installed. Settings are chosen with --split
validation. The plan tiny checks the command in seconds: few images, few steps.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smartprune as sp
from smartprune.cli.models import load_stored_weights, training_inputs
from smartprune.errors import SmartpruneError
from smartprune.experiments.compare.record import save_record
from smartprune.files import write_atomic
from smartprune.pruning.oneshot import allocate
from smartprune.pruning.oneshot.batches import read_batches
from smartprune.run_files import CONFIG, DENSE
from smartprune.tasks import Task
from smartprune.training.config import Config, configure, make_task
from smartprune.training.evaluate import evaluate
from smartprune.training.train import train_dense

ROOT = Path(__file__).parents[1]
INPUTS, ALL = 512, 10**9
METHODS = ("magnitude", "magnitude, new statistics", "prune")
PLAIN = "prune, plain costs"
Cell = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network, its data, and how it is trained.

    Attributes:
        name: Its name in the record.
        task: The task that it is trained on.
        model: What the task builds.
        training: Settings of the training that differ from the recipe of the task.
        data: Settings of the task for training.
        test: Settings of the task that differ for the test.
        batch: How many inputs ``prune`` gets at once.
        block: The size of the blocks.
    """

    name: str
    task: str
    model: str
    training: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    batch: int = 64
    block: str = "16x8"


def on_digits(name: str, model: str = "", data: dict[str, Any] | None = None, **training: Any) -> Network:
    settings = {"dense_epochs": 40, "warmup_epochs": 1.0, **training}
    return Network(name, "digits", model or f"oneshot_models:{name}", settings, data or {}, block="8x4")


def on_cifar10(name: str, epochs: int, model: str = "", test_images: int = 0, **training: Any) -> Network:
    """The last 2,000 training images are held out. The test uses its first images, or all (0)."""
    settings = {"dense_epochs": epochs, "batch": 128, "lr": 0.1, "warmup_epochs": 0.5, **training}
    test = {"holdout": 0, "limit": test_images}
    return Network(name, "cifar10", model or f"oneshot_models:{name}", settings, {"holdout": 2000}, test)


LARGE = {"batch": 512, "lr": 0.4, "warmup_epochs": 5.0, "amp": "bf16"}
SHORT: dict[str, Any] = {"test_images": 2000, "threads": 1, "amp": "bf16", "warmup_epochs": 0.5}
ADAMW = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip_norm": 1.0}
FEW: dict[str, Any] = {"dense_epochs": 1, "batch": 8, "warmup_epochs": 0.0, "threads": 1, "amp": "off"}

PLANS: dict[str, tuple[Network, ...]] = {
    "gpu": (
        on_cifar10("resnet18_half", 200, **LARGE),
        on_cifar10("resnet18", 200, "resnet18", **LARGE),
        on_cifar10("mobilenetv2", 200, "mobilenetv2", **LARGE),
        on_cifar10("densenet", 200, "densenet", **LARGE),
        on_cifar10("vit", 200, **{**LARGE, **ADAMW, "augment": 1.0, "augment_over": "all"}),
        Network("yolov5m", "bccd", "yolov5m", {"amp": "bf16"}, batch=16),
        Network("bisenetv2", "camvid", "bisenetv2", {"amp": "bf16"}, batch=16),
    ),
    "cpu": (
        on_cifar10("mobilenetv2_narrow", 2, **SHORT),
        on_cifar10("vit_narrow", 5, **{**SHORT, **ADAMW}),
        on_cifar10("densenet_short", 2, **SHORT),
        on_cifar10("resnet18_quarter", 6, **SHORT),
        on_cifar10("resnet18_half", 16, **SHORT),
        on_cifar10("vit_small", 30, **{**SHORT, **ADAMW, "warmup_epochs": 2.0}),
    ),
    "digits": (
        on_digits("resnet8", "resnet8", {"width": 16}),
        on_digits("mobilenetv2_digits"),
        on_digits("densenet_digits"),
        on_digits("vit_digits", **{**ADAMW, "dense_epochs": 120, "lr": 2e-3}),
    ),
    "tiny": (
        Network(
            "resnet18_quarter", "cifar10", "oneshot_models:resnet18_quarter", FEW, {"limit": 48, "holdout": 16}, {"holdout": 0}
        ),
        Network(
            "vit_narrow", "cifar10", "oneshot_models:vit_narrow", {**FEW, **ADAMW}, {"limit": 48, "holdout": 16}, {"holdout": 0}
        ),
        Network("yolov5m", "bccd", "yolov5m", FEW, {"size": 64}, batch=4),
        Network("bisenetv2", "camvid", "bisenetv2", FEW, {"height": 64, "width": 64}, batch=4),
    ),
}
"""The networks of a plan. gpu has those of the paper and a vision transformer, cpu has narrower ones and some with fewer epochs,
and digits small ones that are trained in seconds."""


class Bench:
    """The trained networks and the finished cells in a folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.end = time.monotonic() + args.seconds
        self.file = args.out / "cells.jsonl"
        self.cells: list[Cell] = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def run(self, network: Network, seed: int) -> None:
        task = self.task(network)
        dense = task.model(network.model)
        load_stored_weights(dense, self.train(network, seed))
        inputs: list[Any] = []
        for sparsity in (None, *self.args.sparsities):
            for method in (None,) if sparsity is None else self.args.methods:
                if self.find(network, seed, method, sparsity) or (method == METHODS[1] and not has_statistics(dense)):
                    continue
                self.check_time()
                if not inputs:
                    batches = training_inputs(task, dense, network.batch, seed, -(-self.args.inputs // network.batch))
                    inputs = read_batches("bench", dense.to(self.device), batches, ALL)
                began = time.process_time()
                model = copy.deepcopy(dense).to(self.device).eval()
                model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                if method is not None:
                    remove(model, method, network.block, float(sparsity or 0), inputs)
                self.add(network, seed, method, sparsity, model, time.process_time() - began)

    def train(self, network: Network, seed: int) -> Path:
        """The file of the dense network."""
        folder: Path = self.out / f"{network.name}-{seed}"
        if not (folder / DENSE).exists():
            self.check_time()
            new = not (folder / CONFIG).exists()
            print(f"{network.name}, seed {seed}: {'trains' if new else 'continues training'}", flush=True)
            config = self.config(network, seed, folder) if new else None
            train_dense(folder, config, lambda tick: None, lambda: time.monotonic() > self.end, trust=True)
        return folder / DENSE

    def config(self, network: Network, seed: int, folder: Path) -> Config:
        data = {**self.folder(network), **network.data}
        settings = {"task": network.task, "task_settings": data, "model": network.model, "seed": seed, "out": str(folder)}
        return configure({**settings, "device": self.args.device, "block": network.block, "sparsity": 0.5, **network.training})

    def folder(self, network: Network) -> dict[str, Any]:
        """The setting of a task whose data is in a folder."""
        return {} if network.task == "digits" else {"folder": str(Path(self.args.data).absolute() / network.task)}

    def task(self, network: Network, **changes: Any) -> Task:
        return make_task(network.task, {**self.folder(network), **network.data, **changes})

    @property
    def device(self) -> torch.device:
        wanted = self.args.device
        return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)

    def add(
        self, network: Network, seed: int, method: str | None, sparsity: float | None, model: nn.Module, seconds: float
    ) -> None:
        """Evaluates a network, and keeps the result."""
        split = self.args.split
        task = self.task(network, **(network.test if split == "test" else {}))
        metrics, detections, _ = evaluate(task, model, split, self.device)
        cell = {"network": network.name, "seed": seed, "method": method, "sparsity": sparsity, "split": split}
        cell |= {"metric": task.measure, "value": metrics[task.measure], "cpu_seconds": round(seconds, 1)}
        if cell["value"] is None:
            cell["detections"] = f"{network.name}-{seed}-{method}-{sparsity}-{split}.json"
            write_atomic(self.out / cell["detections"], json.dumps(detections).encode())
        self.cells.append(cell)
        with self.file.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        value = "not scored yet" if cell["value"] is None else f"{cell['value']:.4f}"
        print(f"{network.name:20} {seed}  {method or 'dense':26} {sparsity or 0:.2f}  {value}  {seconds:6.1f} s of CPU", flush=True)

    def find(self, network: Network, seed: int, method: str | None, sparsity: float | None) -> Cell | None:
        """The finished cell, scored now if it could not be before."""
        wanted = {"network": network.name, "seed": seed, "method": method, "sparsity": sparsity, "split": self.args.split}
        cell = next((cell for cell in self.cells if {name: cell[name] for name in wanted} == wanted), None)
        if cell is not None and cell["value"] is None:
            task: Any = self.task(network)
            metrics = task.score(json.loads((self.out / cell["detections"]).read_text()), self.args.split)
            if metrics is not None:
                cell["value"] = metrics[task.measure]
                write_atomic(self.file, "".join(json.dumps(each) + "\n" for each in self.cells).encode())
        return cell

    def check_time(self) -> None:
        if time.monotonic() > self.end:
            raise SmartpruneError("out of time; continue with the same command")


def has_statistics(model: nn.Module) -> bool:
    return any(getattr(module, "running_mean", None) is not None for module in model.modules())


def remove(model: nn.Module, method: str, block: str, sparsity: float, inputs: list[Any]) -> None:
    if method in ("prune", PLAIN):
        with plain_costs() if method == PLAIN else nullcontext():
            sp.prune(model, inputs, block, sparsity, samples=ALL)
        return
    pruner = sp.attach(model, "magnitude", block, sparsity, steps=1, example=inputs[0])
    pruner.freeze()
    sp.bake(model, hold=False)
    if method != "magnitude":
        sp.recalibrate(model, inputs, samples=ALL)


@contextmanager
def plain_costs() -> Iterator[None]:
    """Removals cost what the second-order estimate says, also when a layer has lost nearly everything."""
    kept = allocate.with_barriers
    allocate.with_barriers = lambda layers, costs: costs.double()
    try:
        yield
    finally:
        allocate.with_barriers = kept


def summary(cells: list[Cell]) -> dict[str, Any]:
    values = [cell["value"] for cell in sorted(cells, key=lambda cell: int(cell["seed"]))]
    return {
        "values": values,
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
    }


def rows(bench: Bench, networks: list[Network], chosen: Callable[[Cell], bool]) -> list[dict[str, Any]]:
    """One row per network, method and sparsity, over the seeds."""
    out = []
    for network in networks:
        cells = [cell for cell in bench.cells if cell["network"] == network.name and chosen(cell) and cell["value"] is not None]
        dense = [cell for cell in cells if cell["method"] is None]
        for method in bench.args.methods:
            for sparsity in bench.args.sparsities:
                values = [cell for cell in cells if (cell["method"], cell["sparsity"]) == (method, sparsity)]
                if not values:
                    continue
                out.append(
                    {
                        "model": "networks",
                        "data": network.task,
                        "method": f"{network.name}: {method}",
                        "block": network.block,
                        "sparsity": sparsity,
                        "protocol": f"{bench.args.inputs} inputs without labels, no training",
                        "metric": f"{values[0]['metric']}, {bench.args.split}",
                        "unit": "share",
                        **summary(values),
                        "dense": summary(dense),
                    }
                )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="folder that holds cifar10, bccd and camvid")
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained networks and cells.jsonl")
    parser.add_argument("--plan", choices=PLANS, required=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some networks of the plan")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.8, 0.9])
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, PLAIN), default=METHODS)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="starts nothing new after so many seconds")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--record", metavar="NAME")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    networks = [network for network in PLANS[args.plan] if not args.only or network.name in args.only]
    bench = Bench(args)
    if not args.record:
        try:
            for seed in args.seeds:
                for network in networks:
                    bench.train(network, seed) if args.train_only else bench.run(network, seed)
        except SmartpruneError as error:
            raise SystemExit(str(error)) from None
        return
    result = {"rows": rows(bench, networks, lambda cell: cell["seed"] in args.seeds and cell["split"] == args.split)}
    settings = {network.name: {"task": network.task, **network.training, **network.data} for network in networks}
    only = f" --only {' '.join(args.only)}" if args.only else ""
    methods = "" if args.methods == METHODS else f" --split {args.split} --methods {' '.join(map(repr, args.methods))}"
    command = f"python bench/oneshot_networks.py --data DIR --out DIR --plan {args.plan}{only}{methods}"
    machine = f"{bench.device.type}, torch {torch.__version__}"
    save_record(ROOT / "records" / args.record, result, settings, args.note, [command], [machine])


if __name__ == "__main__":
    main()
