"""Models with data and a training loop as a user would write it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo

STEPS = 24
SHORT_SETTINGS = {"acdc": {"cycles": 3}, "awg": {"stages": 3}}  # settings that fit a search of 24 steps
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2),
}


class Case:
    """A model of the zoo. The test attaches the pruner and chooses the optimizer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.x = zoo.PROMISED[name]()
        self.y = torch.randint(0, 10, (self.x.shape[0],))
        self.block = (16, 8) if name == "resnet18" else (4, 4)
        self.include = ["grouped"] if name == "mobilenet_block" else []
        self.sparsity = 0.8

    def attach(self, method: object = None, steps: int = 4, model: nn.Module | None = None, **options: object) -> sp.Pruner:
        arguments = {"block": self.block, "sparsity": self.sparsity, "include": self.include, **options}
        if "budget" in arguments:
            arguments.pop("sparsity")
        return sp.attach(model or self.model, method or sp.Smart(), steps=steps, **arguments)  # type: ignore[arg-type]

    def optimizer(self, kind: str = "sgd") -> torch.optim.Optimizer:
        return OPTIMIZERS[kind](self.model.parameters())

    def loss(self, model: nn.Module | None = None) -> Tensor:
        return nn.functional.cross_entropy((model or self.model)(self.x), self.y)

    def train(self, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, steps: int, model: nn.Module | None = None) -> None:
        for _ in range(steps):
            self.loss(model).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()


class MethodCase:
    """A small model with a method attached and an SGD optimizer."""

    def __init__(self, method: str, model: str = "mobilenet_block", steps: int = STEPS, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.x = zoo.SMALL[model]()
        self.y = torch.randint(0, 10, (len(self.x),))
        include = ["grouped"] if model == "mobilenet_block" else []
        arguments = {"block": (4, 4), "sparsity": 0.8, "include": include, **options}
        if "budget" in arguments:
            arguments.pop("sparsity")
        self.pruner = sp.attach(self.model, short_method(method), steps=steps, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def step(self, parts: int = 1, amp: bool = False) -> None:
        """One optimizer step, accumulated over ``parts`` parts of the batch."""
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = nn.functional.cross_entropy(self.model(x), y)
            (loss / parts + self.pruner.penalty() / parts).backward()
        self.optimizer.step()
        self.pruner.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = STEPS + 3, **options: Any) -> MethodCase:
        for _ in range(steps):
            self.step(**options)
        return self


def short_method(name: str) -> Any:
    """A method with settings that fit a search of 24 steps."""
    return sp.METHODS[name](**SHORT_SETTINGS.get(name, {}))


def removed_elements(pruner: sp.Pruner) -> list[Tensor]:
    """For every pruned weight, a boolean tensor that is true in removed blocks. A slow reference through the grid."""
    out = []
    for layer in pruner.plan.layers:
        mask = pruner.mask[layer.start : layer.stop]
        out.append(layer.grid.expand(mask.float()) == 0)
    return out


ALL_LAYERS = {"block": (4, 4), "sparsity": 0.7, "include": "*"}


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))
