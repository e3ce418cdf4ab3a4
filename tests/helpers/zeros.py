"""Baked models, optimizers and counts for the tests of zeros that stay zero."""

import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def baked(method: object = None, **options: object) -> tuple[Case, sp.Receipt]:
    case = Case("plain_cnn")
    pruner = case.attach(method or sp.Magnitude(), steps=1, **options)
    case.train(pruner, case.optimizer(), 1)
    return case, sp.bake(case.model)


def zeros_of(model: nn.Module, receipt: sp.Receipt) -> int:
    """Zero elements of the pruned layers, counted without smartprune."""
    weights = dict(model.named_parameters())
    return sum(int((weights[row.weight] == 0).sum()) for row in receipt.layers)


def train_plain(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        case.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
