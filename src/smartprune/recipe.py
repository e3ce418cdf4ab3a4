"""A task's default settings for a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Default settings that depend on the task. The fields have the names of the settings of a run."""

    model: str
    block: str
    sparsity: float
    dense_epochs: int
    search_epochs: int
    finetune_epochs: int
    batch: int
    lr: float
    search_lr: float
    finetune_lr: float
    score_lr: float
    momentum: float
    weight_decay: float
    optimizer: str = "sgd"
    schedule: str = "cosine"
    search_schedule: str = "constant"
    schedule_over: str = "stage"
    poly_power: float = 0.9
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1
    clip_norm: float = 0.0
    accumulate: int = 1
    ema: float = 0.0
    amp: str = "off"
    checkpoint_seconds: float = 5.0
    threads: int = 0
