"""One optimizer step of a run: its batches, its learning rate, forward, backward and what follows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import SmartpruneError
from . import ranks
from .cuda_graph import Graph
from .optimizer import lr_factor, set_learning_rates

if TYPE_CHECKING:
    from .run import Run


def steps_of_epoch(run: Run) -> Iterator[tuple[Any, ...]]:
    """The batches of every step, from the run's current step to the end of the epoch."""
    config, first = run.config, run.step % run.steps_per_epoch * run.config.accumulate
    batches = iter(ranks.batches(run.training_data, config.batch, config.seed, run.epoch, first))
    while group := tuple(islice(batches, config.accumulate)):
        yield group


def take_step(run: Run, *batches: Any) -> None:
    """One optimizer step on one or more batches, from Python or as a CUDA graph."""
    set_learning_rates(run.optimizer, lr_factor(run.config, run.stage, run.step, run.steps, run.steps_per_epoch))
    if run.graph is not None:
        run.graph(batches)
    else:
        update_weights(run, batches)
    if run.stage == "search" and run.pruner is not None:
        run.pruner.step()
    if run.ema is not None:
        run.ema.update(run.step + 1)
    if run.graph is None:
        run.optimizer.zero_grad()  # a graph overwrites the old gradients
    run.step += 1


def update_weights(run: Run, batches: tuple[Any, ...]) -> None:
    """Forward and backward for every batch, then the optimizer. Does not synchronize with a GPU."""
    for number, batch in enumerate(batches, start=1):
        with ranks.gradient_sync(run.forward, on=number == len(batches)):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.amp == "bf16"):
                loss = run.task.loss(run.forward, batch)
                if run.teacher is not None:
                    loss = loss + run.teacher.loss()
            if run.pruner is not None:
                loss = loss + run.pruner.penalty()
            run.losses += loss.detach()
            if run.device.type == "cpu":
                require_finite(run)
            (loss / len(batches)).backward()
    if run.config.clip_norm:
        weights = run.optimizer.param_groups[0]["params"]  # without the scores, which are clipped by a setting of the method
        nn.utils.clip_grad_norm_(weights, run.config.clip_norm)
    run.optimizer.step()


def require_finite(run: Run) -> None:
    if not math.isfinite(float(run.losses)):
        raise SmartpruneError(
            f"the loss is {float(run.losses)} in {run.stage}, step {run.step + 1} of {run.steps(run.stage)}; "
            f"lower the learning rate of this stage{' or of the scores (score_lr)' * (run.stage == 'search')} and start again"
        )


def make_graph(run: Run) -> Graph | None:
    """The CUDA graph of this stage's steps, or None if steps run from Python."""
    config = run.config
    if config.graph == "off" or run.device.type != "cuda" or ranks.world_size() > 1:
        return None
    if run.stage == "search" and run.pruner is not None and run.pruner.capabilities.why_not_capturable is not None:
        return None
    return Graph(lambda batches: update_weights(run, batches), run.optimizer, run.pruner, required=config.graph == "on")
