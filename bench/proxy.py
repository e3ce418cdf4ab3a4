"""Compares forms of pruning methods on networks that are small enough to train many of them on one GPU.

python bench/proxy.py --data DIR --plan PLAN.json --out DIR [--processes 8] [--seconds 540] [--mps]

A plan is a list of groups, {"name": "a", "cells": [...]}. A dense cell trains a checkpoint:

    {"dense": "half", "pictures": 45000, "epochs": 200, "batch": 256, "lr": 0.2}

A pruning cell starts from that checkpoint, searches and fine-tunes (batch 128, SGD, one cosine over both stages):

    {"network": "half", "pictures": 45000, "epochs": [8, 12], "sparsity": 0.97, "seeds": [0, 1, 2],
     "method": "smart", "settings": {"ramp": "cubic"}}

``{"best": 4, "of": "a", "name": "b", "seeds": [2]}`` waits for group a, then repeats its best forms with more seeds as group b.
Methods listed in ``always`` are repeated whatever their rank. Cells start in order, as processes become free.

The last 5,000 training images are held out. Base decisions on their accuracy only. The accuracy on the test split is written
to the file for the final report. Images, crops and flips are on the GPU, a step is one CUDA graph, and several processes share
the GPU. Each finished cell is one line of ``cells.jsonl``. A cell starts only if it can end within ``--seconds``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HELD_OUT = 5000  # training images
BLOCK = (16, 8)
SAMPLES = 16  # of the number of undecided blocks, per search
STEP_SECONDS = {"quarter": 0.015, "half": 0.018, "mobilenetv2": 0.04, "densenet": 0.08}  # upper bounds, until a cell is timed
START_SECONDS = 12.0  # upper bound of what a cell takes besides its steps
Cell = dict[str, Any]
Work = Callable[[tuple[Any, ...]], None]


# -- one run ---------------------------------------------------------------------------------------------------------------


def make_network(name: str) -> nn.Module:
    from smartprune.models.densenet import densenet
    from smartprune.models.mobilenetv2 import mobilenetv2
    from smartprune.models.resnet import ResNet

    widths = {"half": (32, 64, 128, 256), "quarter": (16, 32, 64, 128)}
    if name in widths:
        return ResNet(widths[name], (2, 2, 2, 2), 10, 3)
    return {"mobilenetv2": mobilenetv2, "densenet": densenet}[name]()


def without_counters(model: nn.Module) -> nn.Module:
    """Batch norms do not count their batches, which saves one kernel per batch norm and step."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked = None
    return model


def make_method(name: str, settings: dict[str, Any]) -> Any:
    import forms  # bench/forms.py

    from smartprune.methods import METHODS, make

    return make({**METHODS, **forms.FORMS}[name], settings)


def store_images(folder: Path, out: Path) -> None:
    """Decodes the images once, for all processes."""
    import numpy as np

    from smartprune.tasks.cifar10_files import read

    for part in ("train", "test"):
        if not (out / f"{part}.npz").exists():
            images, labels = read(folder, part)
            np.savez(out / f"{part}.npz", images=images, labels=labels)


@lru_cache(maxsize=12)
def split(folder: Path, part: str, count: int, device: str) -> Any:
    """The images on the device. ``part`` is train, validation or test."""
    import numpy as np

    from smartprune.tasks.cifar10 import Split

    stored = np.load(folder / f"{'test' if part == 'test' else 'train'}.npz")
    total = len(stored["labels"])
    selection = {"train": slice(0, count), "validation": slice(total - HELD_OUT, total), "test": slice(0, total)}[part]
    images = torch.from_numpy(stored["images"][selection]).to(device)
    labels = torch.from_numpy(stored["labels"][selection]).to(device).long()
    training = part == "train"
    return Split(images, labels, training, 4 if training else 0, training)


def accuracy(model: nn.Module, data: Any, device: str) -> float:
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        correct = sum((model(x).argmax(1) == y).sum() for x, y in data.batches(1000, seed=0, epoch=0))
    model.train()
    return float(correct) / len(data.labels)


class Stage:
    """The steps of one stage: forward, backward and optimizer. On a GPU they are one CUDA graph."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: Any, device: str) -> None:
        from smartprune.training.cuda_graph import Graph

        self.optimizer, self.device = optimizer, device
        self.losses = torch.zeros((), device=device)

        def work(batches: tuple[Any, ...]) -> None:
            images, labels = batches[0]
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = F.cross_entropy(model(images), labels)
            self.losses += loss.detach()
            loss.backward()
            optimizer.step()

        self.work: Work = work
        self.graph = Graph(work, optimizer, pruner, required=True) if device == "cuda" else None

    def step(self, batch: tuple[Tensor, Tensor], rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is not None:
            self.graph((batch,))
        else:
            self.optimizer.zero_grad()
            self.work((batch,))


def make_optimizer(model: nn.Module, pruner: Any, lr: float, device: str) -> torch.optim.Optimizer:
    scores = [] if pruner is None else pruner.parameters()
    score_ids = {id(p) for p in scores}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in score_ids], "weight_decay": 5e-4}]
    if scores and pruner.phase == "search":
        groups.append(pruner.param_group())
    return torch.optim.SGD(groups, lr, 0.9, nesterov=True, fused=device == "cuda")


def batches_of(data: Any, batch: int, seed: int, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All batches of ``count`` epochs."""
    for epoch in range(first, first + count):
        yield from data.batches(batch, seed, epoch)


def train_dense(cell: Cell, folder: Path, device: str) -> Cell:
    torch.manual_seed(cell.get("seed", 0))
    model = make_network(cell["dense"]).to(device).to(memory_format=torch.channels_last)
    data, epochs, lr = split(folder, "train", cell["pictures"], device), cell["epochs"], cell["lr"]
    total = epochs * data.steps(cell["batch"])
    warmup = max(1, total // 50)
    stage = Stage(model, make_optimizer(model, None, lr, device), None, device)
    for step, batch in enumerate(batches_of(data, cell["batch"], cell.get("seed", 0), 0, epochs)):
        if step == total - data.steps(cell["batch"]):
            stage.losses.zero_()
        rate = lr * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / total))
        stage.step(batch, rate)
        if device == "cuda" and step % 50 == 0:
            torch.cuda.current_stream().synchronize()
    loss = float(stage.losses) / data.steps(cell["batch"])
    values = {part: accuracy(model, split(folder, part, 0, device), device) for part in ("validation", "test")}
    state = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    path = folder / checkpoint_name(cell["dense"], cell["pictures"])
    torch.save({name: value.cpu().contiguous() for name, value in state.items()}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return {**values, "loss": loss}


def checkpoint_name(network: str, pictures: int) -> str:
    return f"dense-{network}-{pictures}.pt"


def prune(cell: Cell, folder: Path, device: str) -> Cell:
    import smartprune as sp

    torch.manual_seed(cell["seed"])
    model = make_network(cell["network"])
    model.load_state_dict(torch.load(folder / checkpoint_name(cell["network"], cell["pictures"]), weights_only=True))
    model = without_counters(model).to(device).to(memory_format=torch.channels_last)
    data, (search, finetune), lr = split(folder, "train", cell["pictures"], device), cell["epochs"], cell.get("lr", 0.02)
    batch = cell.get("batch", 128)
    per_epoch = data.steps(batch)
    total = (search + finetune) * per_epoch
    method = make_method(cell["method"], cell["settings"])
    pruner = sp.attach(model, method, block=BLOCK, sparsity=cell["sparsity"], steps=search * per_epoch, seed=cell["seed"])
    out: Cell = {"undecided": [], "losses": [], "limit": pruner.plan.limit, "blocks": pruner.plan.n}
    step = 0
    samples = {round(search * per_epoch * (i + 1) / SAMPLES) for i in range(SAMPLES)}
    for stage_epochs, first in ((search, 0), (finetune, search)):
        stage = Stage(model, make_optimizer(model, pruner, lr, device), pruner, device)
        for images in batches_of(data, batch, cell["seed"], first + 1000, stage_epochs):
            stage.step(images, lr * 0.5 * (1 + math.cos(math.pi * step / total)))
            if pruner.phase == "search":
                if step + 1 in samples:
                    out["undecided"].append(pruner.telemetry()["undecided"])
                pruner.step()
            step += 1
            if step % per_epoch == 0:
                out["losses"].append(round(float(stage.losses) / per_epoch, 5))
                stage.losses.zero_()
        del stage
    out["kept"] = list(pruner.telemetry()["kept"].values())
    receipt = sp.bake(model)
    out |= {part: accuracy(model, split(folder, part, 0, device), device) for part in ("validation", "test")}
    out |= {"loss": out["losses"][-1], "kept_blocks": int(sum(out["kept"])), "receipt": receipt.mask_hash[:12]}
    return out


# -- many runs ----------------------------------------------------------------------------------------------------------------


def run_cells(pipe: Connection, folder: Path, device: str) -> None:
    """Runs cells until it receives None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    while (cell := pipe.recv()) is not None:
        began = time.perf_counter()
        try:
            out = train_dense(cell, folder, device) if "dense" in cell else prune(cell, folder, device)
        except Exception as error:  # a cell that fails must not end the others
            out = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        pipe.send({**cell, **out, "seconds": round(time.perf_counter() - began, 2)})


def steps_of(cell: Cell) -> int:
    epochs = cell["epochs"] if "dense" in cell else sum(cell["epochs"])
    return int(epochs * (cell["pictures"] // cell.get("batch", 128)))


def network_of(cell: Cell) -> str:
    return str(cell.get("dense", cell.get("network")))


def form_of(cell: Cell) -> tuple[str, str]:
    return cell["method"], json.dumps(cell["settings"], sort_keys=True)


def expand(group: str, cells: list[Cell]) -> list[Cell]:
    """One cell per seed, with all settings."""
    out = []
    for cell in cells:
        if "dense" in cell or "best" in cell:
            out.append({**cell, "group": cell.get("group", group)} if "dense" in cell else cell)
            continue
        full = dataclasses.asdict(make_method(cell["method"], cell.get("settings", {})))
        common = {"sparsity": 0.97, **{k: v for k, v in cell.items() if k != "seeds"}, "settings": full, "group": group}
        out += [{**common, "seed": seed} for seed in cell.get("seeds", [0])]
    return sorted(out, key=lambda cell: cell.get("seed", 0))  # every form gets its first seed before any gets its second


def best_of(cell: Cell, done: list[Cell]) -> list[Cell]:
    """More seeds for the best forms of a group."""
    cells = [c for c in done if c.get("group") == cell["of"] and "validation" in c and "method" in c]
    if cell.get("network"):
        cells = [c for c in cells if c["network"] == cell["network"]]
    groups: dict[tuple[str, str], list[Cell]] = {}
    for c in cells:
        groups.setdefault(form_of(c), []).append(c)
    order = sorted(groups, key=lambda form: -statistics.fmean(c["validation"] for c in groups[form]))
    best = order[: cell["best"]] + [form for form in order[cell["best"] :] if form[0] in cell.get("always", [])]
    new = []
    for form in best:
        common = {key: groups[form][0][key] for key in ("network", "pictures", "epochs", "sparsity", "method", "settings")}
        common |= cell.get("change", {})
        new += [{**common, "group": cell["name"], "seed": seed} for seed in cell["seeds"]]
    return new


class Board:
    """The cells that are waiting, running and finished."""

    def __init__(self, plan: list[dict[str, Any]], out: Path, end: float) -> None:
        self.out, self.end, self.done, self.running = out, end, [], {}
        self.waiting: list[Cell] = [cell for group in plan for cell in expand(group["name"], group["cells"])]
        self.step_times: dict[str, list[float]] = {}
        self.skipped = 0

    def time_of(self, cell: Cell) -> float:
        step_time = max(self.step_times.get(network_of(cell), [STEP_SECONDS[network_of(cell)]])[-6:])
        return START_SECONDS + steps_of(cell) * step_time

    def busy(self, group: str) -> bool:
        cells = [*self.waiting, *self.running.values()]
        return any(cell.get("group") == group or cell.get("name") == group for cell in cells)

    def next(self) -> Cell | None:
        """The first cell that can start now and ends in time."""
        for cell in list(self.waiting):
            if "best" in cell:
                if not self.busy(cell["of"]):
                    index = self.waiting.index(cell)
                    self.waiting[index : index + 1] = best_of(cell, self.done)
                    return self.next()
                continue
            if "dense" not in cell and not (self.out / checkpoint_name(cell["network"], cell["pictures"])).exists():
                continue
            if time.time() + self.time_of(cell) > self.end:
                if "dense" not in cell and network_of(cell) in self.step_times:  # the estimate will not get shorter
                    self.waiting.remove(cell)
                    self.skipped += 1
                continue
            self.waiting.remove(cell)
            return cell
        return None

    def finish(self, cell: Cell) -> None:
        self.done.append(cell)
        if "error" not in cell:
            self.step_times.setdefault(network_of(cell), []).append(max(0.0, cell["seconds"] - 2) / max(1, steps_of(cell)))
        with (self.out / "cells.jsonl").open("a") as file:
            file.write(json.dumps(cell) + "\n")


def describe(cell: Cell) -> str:
    if "dense" in cell:
        name = f"dense {cell['dense']} {cell['pictures']}"
    else:
        defaults = dataclasses.asdict(make_method(cell["method"], {}))
        changed = ", ".join(f"{k}={v}" for k, v in cell["settings"].items() if defaults[k] != v)
        name = f"{cell['network']} {cell['pictures'] // 1000}k {cell['epochs']} {cell['method']}({changed}) seed {cell['seed']}"
    outcome = cell.get("error") or f"{cell['validation']:.4f} loss {cell['loss']:.4f}"
    return f"{cell['seconds']:6.1f} s  {outcome}  {name}"


def run_all(board: Board, processes: int, device: str) -> None:
    """Runs the cells of the board in worker processes until none is left or time is over."""
    began = time.time()
    spawn = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    for _ in range(processes):
        parent, child = spawn.Pipe()
        worker = spawn.Process(target=run_cells, args=(child, board.out, device), daemon=True)
        worker.start()
        workers[parent] = worker
    idle = list(workers)
    while board.waiting or board.running:
        for pipe in list(idle):
            cell = board.next()
            if cell is None:
                break
            idle.remove(pipe)
            board.running[pipe] = cell
            pipe.send(cell)
        if not board.running:
            break
        for pipe in wait(list(board.running), timeout=1.0):
            cell = pipe.recv()
            del board.running[pipe]
            idle.append(pipe)
            board.finish(cell)
            print(f"{time.time() - began:5.0f}  {describe(cell)}", flush=True)
        if time.time() > board.end + 20:
            print("out of time; stopping the running cells", flush=True)
            break
    for pipe, worker in workers.items():
        if pipe in board.running:
            worker.terminate()
        else:
            pipe.send(None)
        worker.join(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and cells.jsonl")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mps", action="store_true", help="share the GPU under NVIDIA's Multi-Process Service")
    args = parser.parse_args()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    store_images(args.data, args.out)
    board = Board(json.loads(args.plan.read_text()), args.out, began + args.seconds)
    service: Any = nullcontext()
    if args.mps:
        from together import MultiProcessService

        service = MultiProcessService()
    with service:
        run_all(board, args.processes, args.device)
    left = len(board.waiting) + board.skipped + len(board.running)
    print(f"{len(board.done)} cells in {time.time() - began:.0f} s, {left} skipped", flush=True)


if __name__ == "__main__":
    main()
