"""A run under way: how it starts, enters a stage, takes a step, and is put away and brought back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import config as configs
from . import rundir
from .budget import macs
from .config import Config
from .errors import SmartpruneError
from .graph import Graph, capturable
from .optimizer import make_optimizer, set_rates, share_of_rate
from .pruner import Pruner, attach
from .tasks import Data, Task

STAGES = ("dense", "search", "finetune")


@dataclass
class Run:
    """What a checkpoint keeps, and what is rebuilt from the configuration."""

    config: Config
    task: Task
    folder: Path
    device: torch.device
    model: nn.Module
    training: Data
    validation: Data
    losses: Tensor  # summed over the epoch so far
    optimizer: torch.optim.Optimizer = field(init=False)
    forward: nn.Module = field(init=False)  # the model, or its compiled form
    pruner: Pruner | None = None
    graph: Graph | None = None  # the step of this stage, recorded
    stage: str = STAGES[0]
    step: int = 0  # within the stage
    rows: int = 0
    dense: float = math.nan
    loss: float | None = None  # mean of the last epoch
    value: float | None = None  # of the metric, on the validation split, after it
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    clock: float = field(default_factory=time.monotonic)

    @property
    def per_epoch(self) -> int:
        return self.training.steps(self.config.batch)

    def epochs(self, stage: str) -> int:
        return {
            "dense": 0 if self.config.dense is not None else self.config.dense_epochs,
            "search": self.config.search_epochs,
            "finetune": self.config.finetune_epochs,
        }[stage]

    def steps(self, stage: str) -> int:
        return self.epochs(stage) * self.per_epoch

    @property
    def epoch(self) -> int:
        """Number of the epoch over all stages. It chooses the data order, so ``--dense`` must not change it."""
        before = {"dense": 0, "search": self.config.dense_epochs}
        before["finetune"] = before["search"] + self.config.search_epochs
        return before[self.stage] + self.step // self.per_epoch

    def tell_time(self) -> float:
        """Seconds so far, over all processes that worked on this run."""
        now = time.monotonic()
        self.seconds[self.stage] += now - self.clock
        self.clock = now
        return sum(self.seconds.values())


@contextmanager
def settled(config: Config) -> Iterator[None]:
    """Seed, threads and determinism for a run; all of them are put back afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if config.device == "cuda" else []):
        torch.manual_seed(config.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(config.device == "cpu")
        torch.backends.cudnn.benchmark = config.device == "cuda"
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)
            torch.backends.cudnn.benchmark = benchmark


def start(folder: Path, config: Config) -> Run:
    """A run at its beginning, or at its last checkpoint."""
    task, device = configs.make_task(config.task, config.task_settings), torch.device(config.device)
    model = task.model(config.model)
    if config.dense is not None:
        rundir.load_weights(model, Path(config.dense))
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    losses = torch.zeros((), dtype=torch.float64, device=device)
    run = Run(
        config=config,
        task=task,
        folder=folder,
        device=device,
        model=model,
        training=task.data("train", device),
        validation=task.data("validation", device),
        losses=losses,
    )
    enter(run, "dense")
    state = rundir.load_checkpoint(folder)
    rundir.tidy(folder)
    rundir.keep_rows(folder, state["rows"] if state else 0)
    if state:
        restore(run, state)
    return run


def enter(run: Run, stage: str) -> None:
    """The beginning of a stage: the search attaches the pruner, and every stage has an optimizer of its own."""
    run.tell_time()
    run.stage, run.step, run.losses, run.loss, run.value = stage, 0, torch.zeros_like(run.losses), None, None
    if stage != "dense" and run.pruner is None:
        run.pruner = prune(run.model, run.config, run.task, run.steps("search"))
    run.optimizer = make_optimizer(run.model, run.config, stage, run.pruner)
    run.forward = torch.compile(run.model) if run.config.compile == "on" else run.model  # type: ignore[assignment]
    run.graph = make_graph(run)


def make_graph(run: Run) -> Graph | None:
    """The recorder of this stage's steps, or None if they are to be launched from Python."""
    config = run.config
    if config.graph == "off" or run.device.type != "cuda":
        return None
    if run.stage == "search" and run.pruner is not None and capturable(run.pruner.method) is not None:
        return None
    return Graph(lambda batch: learn(run, batch), run.optimizer, run.pruner, required=config.graph == "on")


def prune(model: nn.Module, config: Config, task: Task, steps: int) -> Pruner:
    """Attaches the configured method; ``steps`` is the length of the search."""
    example = task.example().to(next(model.parameters()).device)
    return attach(
        model,
        configs.make_method(config.method, config.settings),
        block=config.block,
        sparsity=config.sparsity,
        budget=None if config.macs is None else macs(config.macs, example=example),
        floor=config.floor,
        include=config.include,
        skip=config.skip,
        example=example,
        steps=steps,
    )


def take_step(run: Run, batch: Any) -> None:
    """One optimizer step on one batch, from Python or, where that is asked for, as one CUDA graph."""
    set_rates(run.optimizer, share_of_rate(run.config, run.stage, run.step, run.steps))
    if run.graph is not None:
        run.graph(batch)
    else:
        learn(run, batch)
    if run.stage == "search" and run.pruner is not None:
        run.pruner.step()
    if run.graph is None:
        run.optimizer.zero_grad()  # a graph writes its gradients over the old ones
    run.step += 1


def learn(run: Run, batch: Any) -> None:
    """Forward, backward, optimizer; on a GPU it waits for nothing."""
    with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.amp == "bf16"):
        loss = run.task.loss(run.forward, batch)
    if run.pruner is not None:
        loss = loss + run.pruner.penalty()
    run.losses += loss.detach()
    if run.device.type == "cpu":
        require_finite(run)
    loss.backward()
    run.optimizer.step()


def require_finite(run: Run) -> None:
    if not math.isfinite(float(run.losses)):
        raise SmartpruneError(
            f"the loss is {float(run.losses)} in {run.stage}, step {run.step + 1} of {run.steps(run.stage)}; "
            "lower the learning rate of this stage, or that of the scores (score_lr), and start again"
        )


def put_away(run: Run) -> None:
    """Writes the checkpoint: tensors and plain values only."""
    require_finite(run)
    run.tell_time()
    state = {
        "version": 1,
        "stage": run.stage,
        "step": run.step,
        "rows": run.rows,
        "dense": run.dense,
        "loss": run.loss,
        "value": run.value,
        "seconds": dict(run.seconds),
        "losses": run.losses,
        "model": dict(run.model.state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "pruner": None if run.pruner is None else run.pruner.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if run.device.type == "cuda" else None,
    }
    rundir.save_checkpoint(run.folder, rundir.to_cpu(state))


def restore(run: Run, state: dict[str, Any]) -> None:
    """Brings a fresh run to where a checkpoint was written."""
    path = run.folder / rundir.CHECKPOINT
    try:
        enter(run, state["stage"])
        run.model.load_state_dict(state["model"])
        if run.pruner is not None:
            run.pruner.load_state_dict(state["pruner"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.step, run.rows, run.dense = state["step"], state["rows"], state["dense"]
        run.loss, run.value = state["loss"], state["value"]
        run.seconds.update(state["seconds"])
        run.losses.copy_(state["losses"])
        torch.set_rng_state(state["random"])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SmartpruneError(
            f"{path} does not fit {rundir.CONFIG} beside it ({rundir.first_line(error)}); "
            "delete it to start the run from its beginning"
        ) from None
