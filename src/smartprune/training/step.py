"""One optimizer step of a run: its batches, its learning rate, forward, backward, and what follows from it."""

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
from .optimizer import set_rates, share_of_rate

if TYPE_CHECKING:
    from .run import Run


def steps_of_epoch(run: Run) -> Iterator[tuple[Any, ...]]:
    """The batches of every step from the run's own on, to the end of the epoch."""
    config, at = run.config, run.step % run.per_epoch * run.config.accumulate
    batches = iter(ranks.batches(run.training, config.batch, config.seed, run.epoch, at))
    while some := tuple(islice(batches, config.accumulate)):
        yield some


def take_step(run: Run, *batches: Any) -> None:
    """One optimizer step on one or more batches, from Python or, where that is asked for, as one CUDA graph."""
    set_rates(run.optimizer, share_of_rate(run.config, run.stage, run.step, run.steps, run.per_epoch))
    if run.graph is not None:
        run.graph(batches)
    else:
        learn(run, batches)
    if run.stage == "search" and run.pruner is not None:
        run.pruner.step()
    if run.average is not None:
        run.average.update(run.step + 1)
    if run.graph is None:
        run.optimizer.zero_grad()  # a graph writes its gradients over the old ones
    run.step += 1


def learn(run: Run, batches: tuple[Any, ...]) -> None:
    """Forward and backward for every batch, then the optimizer; on a GPU it waits for nothing."""
    for number, batch in enumerate(batches, start=1):
        with ranks.exchange(run.forward, on=number == len(batches)):
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
        weights = run.optimizer.param_groups[0]["params"]  # not the scores, which have a clip of their own
        nn.utils.clip_grad_norm_(weights, run.config.clip_norm)
    run.optimizer.step()


def require_finite(run: Run) -> None:
    if not math.isfinite(float(run.losses)):
        raise SmartpruneError(
            f"the loss is {float(run.losses)} in {run.stage}, step {run.step + 1} of {run.steps(run.stage)}; "
            f"lower the learning rate of this stage{' or that of the scores (score_lr)' * (run.stage == 'search')}, and start again"
        )


def make_graph(run: Run) -> Graph | None:
    """The recorder of this stage's steps, or None if they are to be launched from Python."""
    config = run.config
    if config.graph == "off" or run.device.type != "cuda" or ranks.world() > 1:
        return None
    if run.stage == "search" and run.pruner is not None and run.pruner.capabilities.why_not_capturable is not None:
        return None
    return Graph(lambda batches: learn(run, batches), run.optimizer, run.pruner, required=config.graph == "on")
