"""A short training job of any method."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.methods import METHODS

STEPS = 24


SHORT = {
    "acdc": {"cycles": 3},
    "awg": {"stages": 3},
}  # settings that fit a search of 24 steps; others take their defaults


def method_of(name: str) -> Any:
    return METHODS[name](**SHORT.get(name, {}))


class Job:
    """A model, its data, and a loop as a user writes it."""

    def __init__(self, name: str, model: str = "mobilenet_block", steps: int = STEPS, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.x = zoo.SMALL[model]()
        self.y = torch.randint(0, 10, (len(self.x),))
        given = {
            "block": (4, 4),
            "sparsity": 0.8,
            "include": ["grouped"] if model == "mobilenet_block" else [],
            **options,
        }
        if "budget" in given:
            given.pop("sparsity")
        self.pruner = sp.attach(self.model, method_of(name), steps=steps, **given)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    def step(self, parts: int = 1, amp: bool = False) -> None:
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = nn.functional.cross_entropy(self.model(x), y)
            (loss / parts + self.pruner.penalty() / parts).backward()
        self.optimizer.step()
        self.pruner.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = STEPS + 3, **options: Any) -> Job:
        for _ in range(steps):
            self.step(**options)
        return self
