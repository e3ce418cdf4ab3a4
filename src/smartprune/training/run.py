"""A run under way: how it starts, enters a stage, and is put away and brought back. (Its steps: ``step.py``.)"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import run_files
from ..core import sharding
from ..errors import SmartpruneError
from ..pruning.pruner import Pruner, attach
from ..run_files import STAGES
from ..tasks import Data, Task
from ..tasks.augment import Augmented
from . import config as configs
from . import ranks
from .config import Config
from .cuda_graph import Graph
from .distill import Teacher
from .ema import Ema
from .folder import first_line, load_checkpoint, load_weights, remove_temporary_files, save_checkpoint, to_cpu, trim_metrics
from .optimizer import make_optimizer
from .step import make_graph, require_finite
from .trackers import Events


@dataclass
class Run:
    """What a checkpoint keeps, and what is rebuilt from the configuration."""

    config: Config
    task: Task
    folder: Path
    device: torch.device
    model: nn.Module
    plain: Data  # what there is to train on
    validation: Data
    losses: Tensor  # summed over the batches of the epoch so far, of this rank
    optimizer: torch.optim.Optimizer = field(init=False)
    forward: nn.Module = field(init=False)  # the model, or its form for several processes, or its compiled form
    pruner: Pruner | None = None
    average: Ema | None = None  # of the weights in this stage
    teacher: Teacher | None = None  # the dense model, to distil from
    events: Events | None = None  # the metrics for TensorBoard
    graph: Graph | None = None  # the step of this stage, recorded
    stage: str = STAGES[0]
    step: int = 0  # within the stage
    rows: int = 0
    lost: int = 0  # rows that were written before the checkpoint and are not there any more
    dense: float | None = None  # the metric of the dense model
    also: dict[str, dict[str, float | None]] = field(default_factory=dict)  # other figures, see ``Result``
    loss: float | None = None  # mean of the last epoch
    value: float | None = None  # of the metric, on the validation split, after it
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    clock: float = field(default_factory=time.monotonic)

    @property
    def training(self) -> Data:
        """What there is to train on, as it is shown in this stage."""
        return shown(self.plain, self.config, self.stage)

    @property
    def batches(self) -> int:
        """In an epoch."""
        return self.plain.steps(self.config.batch)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch; its last one may have fewer batches than the others."""
        return -(-self.batches // self.config.accumulate)

    @property
    def seen(self) -> int:
        """Batches of this epoch so far."""
        return min(self.step % self.per_epoch * self.config.accumulate, self.batches)

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

    def done(self, stage: str, step: int) -> int:
        """Steps of the whole run when so many of a stage are done."""
        return sum(self.steps(earlier) for earlier in STAGES[: STAGES.index(stage)]) + step

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
    benchmark, exact = torch.backends.cudnn.benchmark, config.device == "cpu" or config.deterministic == "on"
    if exact and config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products on a GPU ask for
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if config.device == "cuda" else []):
        torch.manual_seed(config.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(exact)
        torch.backends.cudnn.benchmark = not exact  # trying out kernels may choose another one next time
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(strict)
            torch.backends.cudnn.benchmark = benchmark


def start(folder: Path, config: Config) -> Run:
    """A run at its beginning, or at its last checkpoint."""
    task, device = configs.make_task(config.task, config.task_settings), torch.device(config.device)
    model = fresh(task, config, dense_file(folder, config), device)
    if config.sync_bn == "on" and ranks.world() > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.parallel == "fsdp" and ranks.world() > 1:
        ranks.shard(model, device)
    run = Run(
        config=config,
        task=task,
        folder=folder,
        device=device,
        model=model,
        plain=task.data("train", device),
        validation=task.data("validation", device),
        losses=torch.zeros((), dtype=torch.float64, device=device),
    )
    ranks.require_shares(run.plain, config.batch)
    state = load_checkpoint(folder)
    enter(run, "dense")
    if state:
        restore(run, state)
    if ranks.rank() == 0:
        remove_temporary_files(folder)
        here = run.done(run.stage, run.step)
        kept = trim_metrics(folder, lambda stage, step: stage in STAGES and run.done(stage, step) <= here)
        run.rows, run.lost = kept, run.rows - kept
    if config.tensorboard == "on" and ranks.rank() == 0:
        run.events = Events(folder, folder / run_files.METRICS, run.done)
    return run


@contextmanager
def closing(run: Run) -> Iterator[None]:
    """Lets go of what the run holds open, and of what leads back to it and would keep its model, and a recording's memory, until
    later. What ended the run is told, and not that a full disk, say, keeps TensorBoard from its end."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            _close(run)
        raise
    _close(run)


def _close(run: Run) -> None:
    events, run.events, run.graph = run.events, None, None
    if events is not None:
        events.close()


def dense_file(folder: Path, config: Config) -> Path | None:
    """The dense model that was given; where that is gone, the copy of it that a run keeps."""
    if config.dense is None:
        return None
    given, own = Path(config.dense), folder / run_files.DENSE
    return own if own.exists() and not given.exists() else given


def fresh(task: Task, config: Config, weights: Path | None, device: torch.device) -> nn.Module:
    """The configured network on the device, from a file or with the weights it is made with."""
    model = task.model(config.model)
    if weights is not None:
        load_weights(model, weights)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def enter(run: Run, stage: str) -> None:
    """The beginning of a stage: the search attaches the pruner; every stage has an optimizer, and an average, of its own.

    The search has no average: its mask moves, and nothing is judged by it.
    """
    config = run.config
    run.tell_time()
    run.stage, run.step, run.losses, run.loss, run.value = stage, 0, torch.zeros_like(run.losses), None, None
    if stage != "dense" and run.pruner is None:
        run.pruner = prune(run.model, config, run.task, run.steps("search"))
    run.optimizer = make_optimizer(run.model, config, stage, run.pruner)
    run.average = Ema(run.model, config.ema) if config.ema and stage != "search" else None
    run.graph, run.forward = None, run.model
    if ranks.world() > 1 and config.parallel == "ddp":
        still = run.pruner is not None and not run.pruner.capabilities.trains_weights
        run.forward = ranks.wrap(run.model, run.device, unused=still and stage == "search")
    if config.compile == "on":
        run.forward = torch.compile(run.forward)  # type: ignore[assignment]
    if config.distill and stage != "dense":
        if run.teacher is None:
            with torch.random.fork_rng(devices=[]):
                dense = fresh(run.task, config, run.folder / run_files.DENSE, run.device)
            run.teacher = Teacher(dense, run.task.distance, config.distill, config.distill_temperature)  # type: ignore[attr-defined]
        run.teacher.watch(run.forward)
    run.graph = make_graph(run)


def shown(data: Data, config: Config, stage: str) -> Data:
    """The training data as this stage sees it."""
    stages = {"search": STAGES[1:2], "pruning": STAGES[1:], "all": STAGES}[config.augment_over]
    return Augmented(data, config.augment) if config.augment and stage in stages else data


def prune(model: nn.Module, config: Config, task: Task, steps: int) -> Pruner:
    """Attaches the configured method; ``steps`` is the length of the search."""
    first = next(model.parameters(), None)
    if first is None:
        raise SmartpruneError(f"model={config.model!r} has no parameters, so there is nothing to train or prune; give another one")
    example = task.example().to(first.device)
    return attach(
        model,
        configs.make_method(config.method, config.settings),
        block=config.block,
        budget=configs.make_budget(*config.asked, example, config.npu),
        floor=config.floor,
        include=config.include,
        skip=config.skip,
        example=example,
        steps=steps,
    )


def put_away(run: Run) -> None:
    """Writes the checkpoint: whole tensors and plain values only, whatever the number of processes."""
    require_finite(run)
    run.tell_time()
    losses = torch.tensor(ranks.gathered(float(run.losses)), dtype=torch.float64, device="cpu")
    split = sharding.is_sharded(next(run.model.parameters()))  # then it takes all ranks to make them whole
    state = to_cpu(_state(run) | {"losses": losses}) if split or ranks.rank() == 0 else {}
    ranks.first(lambda: save_checkpoint(run.folder, state))


def _state(run: Run) -> dict[str, Any]:
    return {
        "version": 1,
        "stage": run.stage,
        "step": run.step,
        "rows": run.rows,
        "dense": run.dense,
        "also": run.also,
        "loss": run.loss,
        "value": run.value,
        "seconds": dict(run.seconds),
        "model": dict(run.model.state_dict()),
        "average": None if run.average is None else run.average.state(),
        "optimizer": run.optimizer.state_dict(),
        "pruner": None if run.pruner is None else run.pruner.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if run.device.type == "cuda" else None,
    }


def restore(run: Run, state: dict[str, Any]) -> None:
    """Brings a fresh run to where a checkpoint was written, by as many processes or by another number."""
    path = run.folder / run_files.CHECKPOINT
    try:
        enter(run, state["stage"])
        run.model.load_state_dict(sharding.shard_state(state["model"], run.model.state_dict()))
        if run.pruner is not None:
            run.pruner.load_state_dict(state["pruner"])
        run.optimizer.load_state_dict(_split_state(state["optimizer"], run.optimizer))
        if run.average is not None:
            run.average.load(state["average"])
        run.step, run.rows, run.dense = state["step"], state["rows"], state["dense"]
        run.loss, run.value, run.also = state["loss"], state["value"], state.get("also", {})
        run.seconds.update(state["seconds"])
        losses = state["losses"].reshape(-1)
        run.losses.copy_(losses[ranks.rank()] if len(losses) == ranks.world() else losses.mean())
        torch.set_rng_state(state["random"])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"])
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SmartpruneError(
            f"{path} does not fit {run_files.CONFIG} beside it ({first_line(error)}); delete it to start the run from its beginning"
        ) from None


def _split_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer in whole tensors, in the parts of the parameters that it belongs to."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {
        number: {name: sharding.shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": own}


def averaged(run: Run) -> Any:
    """In here the model has its averaged weights, if there is an average."""
    return nullcontext() if run.average is None else run.average.in_place()
