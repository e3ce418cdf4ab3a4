"""The optimizer of a stage, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..pruning.pruner import Pruner
from .config import Config

SHAPES: dict[str, Callable[[float, float], float]] = {  # the factor of the learning rate over the progress of a schedule
    "cosine": lambda progress, power: 0.5 * (1 + math.cos(math.pi * progress)),
    "poly": lambda progress, power: (1 - progress) ** power,
    "linear": lambda progress, power: 1 - progress,
    "constant": lambda progress, power: 1.0,
}


def make_optimizer(model: nn.Module, config: Config, stage: str, pruner: Pruner | None) -> torch.optim.Optimizer:
    """An optimizer of the weights and, during the search, of the scores. Weights and scores have separate learning rates."""
    score_group: dict[str, Any] = {"params": []}
    if pruner is not None:
        score_group = pruner.param_group(lr=config.score_lr, weight_decay=config.score_decay)
    scores = {id(parameter) for parameter in score_group["params"]}
    lr = {"dense": config.lr, "search": config.search_lr, "finetune": config.finetune_lr}[stage]
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in scores]}]
    if stage == "search" and scores:
        groups.append(score_group)
    cuda = groups[0]["params"][0].is_cuda
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups,
            lr,
            config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
            fused=cuda or None,  # one kernel, which can read the learning rate from a tensor on the device
        )
    else:
        optimizer = torch.optim.AdamW(groups, lr, weight_decay=config.weight_decay, fused=cuda or None, capturable=cuda)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def lr_factor(config: Config, stage: str, step: int, steps: Callable[[str], int], per_epoch: int) -> float:
    """The factor of the initial learning rate at a step; ``steps`` gives the length of a stage.

    Every schedule starts with the warm-up, if there is one: a straight line from ``warmup_start`` to 1. The shape of the
    schedule covers the remaining steps.
    """
    shape = config.search_schedule if stage == "search" and config.schedule_over == "stage" else config.schedule
    total = steps(stage)
    if stage != "dense" and config.schedule_over == "pruning":
        step, total = step if stage == "search" else steps("search") + step, steps("search") + steps("finetune")
    warmup = min(round(config.warmup_epochs * per_epoch), total - 1)
    if step < warmup:
        return config.warmup_start + (1 - config.warmup_start) * step / warmup
    return SHAPES[shape]((step - warmup) / (total - warmup), config.poly_power)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets the learning rate of every group. A tensor, which a CUDA graph may read, is changed in place."""
    for group in optimizer.param_groups:
        lr = factor * group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
