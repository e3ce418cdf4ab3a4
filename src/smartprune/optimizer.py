"""The optimizer of a training stage, and its learning rate at every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .pruner import Pruner

SHAPES: dict[str, Callable[[float], float]] = {  # learning rate over a schedule, as a share of its first value
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
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


def share_of_rate(config: Config, stage: str, step: int, steps: Callable[[str], int]) -> float:
    """What the schedule leaves of the first learning rate at a step; ``steps`` gives the length of a stage."""
    if stage == "dense" or config.schedule_over == "stage":
        shape = config.search_schedule if stage == "search" else config.schedule
        return SHAPES[shape](step / steps(stage))
    done = step if stage == "search" else steps("search") + step
    return SHAPES[config.schedule](done / (steps("search") + steps("finetune")))


def set_rates(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Sets every group's learning rate. One that lives on the device, for a CUDA graph to read, is changed in place."""
    for group in optimizer.param_groups:
        rate = share * group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
