"""A model with its data and a training loop as a user would write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo


class Case:
    """A model with its data, and a training loop as a user would write it."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.x = zoo.PROMISED[name]()
        self.y = torch.randint(0, 10, (self.x.shape[0],))
        self.block = (16, 8) if name == "resnet18" else (4, 4)
        self.include = ["grouped"] if name == "mobilenet_block" else []
        self.sparsity = 0.8

    def attach(self, method: object = None, steps: int = 4, model: nn.Module | None = None, **options: object) -> sp.Pruner:
        given = {"block": self.block, "sparsity": self.sparsity, "include": self.include, **options}
        if "budget" in given:
            given.pop("sparsity")
        return sp.attach(model or self.model, method or sp.Smart(), steps=steps, **given)  # type: ignore[arg-type]

    def optimizer(self, pruner: sp.Pruner | None = None, kind: str = "sgd") -> torch.optim.Optimizer:
        kinds = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=5e-4),
            "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-2),
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=1e-2),
        }
        return kinds[kind](self.model.parameters())

    def loss(self, model: nn.Module | None = None) -> Tensor:
        return nn.functional.cross_entropy((model or self.model)(self.x), self.y)

    def train(self, pruner: sp.Pruner, optimizer: torch.optim.Optimizer, steps: int, model: nn.Module | None = None) -> None:
        for _ in range(steps):
            self.loss(model).backward()
            optimizer.step()
            pruner.step()
            optimizer.zero_grad()


def removed_elements(pruner: sp.Pruner) -> list[Tensor]:
    """For every pruned weight, where its removed blocks are: a slow reference through the grid."""
    out = []
    for layer in pruner.plan.layers:
        piece = pruner.mask[layer.start : layer.stop]
        out.append(layer.grid.expand(piece.float()) == 0)
    return out
