"""Small pruned models with their receipts."""

from __future__ import annotations

import torch
from torch import nn

from helpers import zoo
from smartprune.artifacts.receipt import Receipt
from smartprune.pruning.plan import plan
from smartprune.pruning.receipt import make_receipt


def baked(name: str = "plain_cnn", block: tuple[int, ...] = (4, 4), sparsity: float = 0.75) -> tuple[nn.Module, Receipt]:
    """A model with random blocks set to zero, and its receipt."""
    model, _ = zoo.SMALL[name]()
    found = plan(model, block, sparsity)
    mask = torch.zeros(found.n, dtype=torch.bool)
    mask[torch.randperm(found.n)[: found.keep]] = True
    with torch.no_grad():
        for layer in found.layers:
            model.get_parameter(layer.weight).mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    return model, make_receipt(found, model.state_dict(), mask, "magnitude")
