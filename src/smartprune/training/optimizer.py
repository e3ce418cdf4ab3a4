"""The optimizer of a training stage, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..pruning.pruner import Pruner
from .config import Config

SHAPES: dict[str, Callable[[float, float], float]] = {  # learning rate over a schedule, as a share of its first value
    "cosine": lambda progress, power: 0.5 * (1 + math.cos(math.pi * progress)),
    "poly": lambda progress, power: (1 - progress) ** power,
    "linear": lambda progress, power: 1 - progress,
    "constant": lambda progress, power: 1.0,
}


def make_optimizer(model: nn.Module, config: Config, stage: str, pruner: Pruner | None) -> torch.optim.Optimizer:
    """The weights at the stage's learning rate; while the search goes on also the scores, at their own."""
    scores: dict[str, Any] = {"params": []} if pruner is None else pruner.param_group(lr=config.score_lr)
    own = {id(parameter) for parameter in scores["params"]}
    rate = {"dense": config.lr, "search": config.search_lr, "finetune": config.finetune_lr}[stage]
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in own]}]
    if stage == "search" and own:
        groups.append(scores)
    cuda = groups[0]["params"][0].is_cuda
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups,
            rate,
            config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
            fused=cuda or None,  # one kernel, which reads the learning rate from the device if it is a tensor
        )
    else:
        optimizer = torch.optim.AdamW(groups, rate, weight_decay=config.weight_decay, fused=cuda or None, capturable=cuda)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def share_of_rate(config: Config, stage: str, step: int, steps: Callable[[str], int], per_epoch: int) -> float:
    """What the schedule leaves of the first learning rate at a step; ``steps`` gives the length of a stage.

    Every schedule begins with the warm-up, if there is one: a straight line from ``warmup_start`` to 1. What is left of
    the schedule then runs from 1 on.
    """
    shape = config.search_schedule if stage == "search" and config.schedule_over == "stage" else config.schedule
    total = steps(stage)
    if stage != "dense" and config.schedule_over == "pruning":
        step, total = step if stage == "search" else steps("search") + step, steps("search") + steps("finetune")
    warm = min(round(config.warmup_epochs * per_epoch), total - 1)
    if step < warm:
        return config.warmup_start + (1 - config.warmup_start) * step / warm
    return SHAPES[shape]((step - warm) / (total - warm), config.poly_power)


def set_rates(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Sets every group's learning rate. One that lives on the device, for a CUDA graph to read, is changed in place."""
    for group in optimizer.param_groups:
        rate = share * group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
