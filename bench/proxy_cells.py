"""The cells of bench/proxy.py: one dense training, or one search with its fine-tuning, on a small network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HELD_OUT = 5000  # training images
BLOCK = (16, 8)
SAMPLES = 16  # of the number of undecided blocks, per search
Cell = dict[str, Any]
Work = Callable[[tuple[Any, ...]], None]


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
