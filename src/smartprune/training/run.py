"""The state of a run: how it starts, enters a stage, is saved to a checkpoint and restored. (Its steps are in ``step.py``.)"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import run_files
from ..budgets import budget_fields
from ..core import sharding
from ..errors import SmartpruneError
from ..files import parse_json
from ..pruning.attach import attach
from ..pruning.plan import plan
from ..pruning.pruner import Pruner
from ..run_files import STAGES
from ..tasks import Data, Task
from ..tasks.augment import Augmented
from . import ranks
from .config import Config, changed_settings, make_budget, make_method, make_task, training_settings
from .cuda_graph import Graph
from .distill import Teacher
from .ema import Ema
from .evaluate import Metrics
from .folder import first_line, load_weights, read_checkpoint, remove_temporary_files, to_cpu, trim_metrics, write_checkpoint
from .optimizer import make_optimizer
from .step import make_graph, require_finite
from .trackers import Tracker, open_trackers


@dataclass
class Run:
    """What a checkpoint stores, and what is rebuilt from the configuration."""

    config: Config
    task: Task
    folder: Path
    device: torch.device
    model: nn.Module
    data: Data  # the training split, not augmented
    validation: Data
    losses: Tensor  # the sum over the batches of this epoch so far, on this rank
    optimizer: torch.optim.Optimizer = field(init=False)
    forward: nn.Module = field(init=False)  # the model, possibly wrapped in DDP or compiled
    pruner: Pruner | None = None
    ema: Ema | None = None  # of the weights in this stage
    teacher: Teacher | None = None  # the dense model, for distillation
    trackers: list[Tracker] = field(default_factory=list)
    graph: Graph | None = None  # the recorded step of this stage
    stage: str = STAGES[0]
    step: int = 0  # within the stage
    rows: int = 0  # of metrics
    lost_rows: int = 0  # rows that the checkpoint counts and the file lacks
    dense: float | None = None  # the test metric of the dense model
    other_metrics: dict[str, Metrics] = field(default_factory=dict)  # besides the measure, of "dense" and "pruned"
    test_samples: int = 0  # of the test split, once a model was evaluated on it
    loss: float | None = None  # the mean of the last epoch
    metric: float | None = None  # on the validation split, after the last epoch
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    last_time: float = field(default_factory=time.monotonic)

    @property
    def training_data(self) -> Data:
        """The training split as this stage sees it."""
        return data_of_stage(self.data, self.config, self.stage)

    @property
    def batches_per_epoch(self) -> int:
        return self.data.steps(self.config.batch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps. The last one of an epoch may have fewer batches than the others."""
        return -(-self.batches_per_epoch // self.config.accumulate)

    @property
    def batches_done(self) -> int:
        """Batches of this epoch so far."""
        return min(self.step % self.steps_per_epoch * self.config.accumulate, self.batches_per_epoch)

    def epochs(self, stage: str) -> int:
        return {
            "dense": 0 if self.config.dense is not None else self.config.dense_epochs,
            "search": self.config.search_epochs,
            "finetune": self.config.finetune_epochs,
        }[stage]

    def steps(self, stage: str) -> int:
        return self.epochs(stage) * self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return sum(map(self.steps, STAGES))

    @property
    def epoch(self) -> int:
        """The number of the epoch over all stages. It determines the data order, so ``--dense`` must not change it."""
        before = {"dense": 0, "search": self.config.dense_epochs}
        before["finetune"] = before["search"] + self.config.search_epochs
        return before[self.stage] + self.step // self.steps_per_epoch

    def global_step(self, stage: str, step: int) -> int:
        """The step within the whole run for a step of a stage."""
        return sum(self.steps(earlier) for earlier in STAGES[: STAGES.index(stage)]) + step

    def elapsed(self) -> float:
        """Training time in seconds so far, over all processes that worked on this run. Adds the time since the last call."""
        now = time.monotonic()
        self.seconds[self.stage] += now - self.last_time
        self.last_time = now
        return sum(self.seconds.values())


@contextmanager
def deterministic(config: Config) -> Iterator[None]:
    """Sets the seed, the threads and torch's determinism for a run, and restores them afterwards."""
    threads, previous = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark, exact = torch.backends.cudnn.benchmark, config.device == "cpu" or config.deterministic == "on"
    if exact and config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matrix products on a GPU
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if config.device == "cuda" else []):
        torch.manual_seed(config.seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(exact)
        torch.backends.cudnn.benchmark = not exact  # benchmarking may choose another kernel next time
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(previous)
            torch.backends.cudnn.benchmark = benchmark


def start_run(folder: Path, config: Config) -> Run:
    """A run at its beginning, or at its last checkpoint."""
    task, device = make_task(config.task, config.task_settings), torch.device(config.device)
    model = make_model(task, config, dense_weights(folder, config), device)
    if config.sync_bn == "on" and ranks.world_size() > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.parallel == "fsdp" and ranks.world_size() > 1:
        ranks.shard_fsdp(model, device)
    run = Run(
        config=config,
        task=task,
        folder=folder,
        device=device,
        model=model,
        data=task.data("train", device),
        validation=task.data("validation", device),
        losses=torch.zeros((), dtype=torch.float64, device=device),
    )
    ranks.require_divisible(run.data, config.batch)
    checkpoint = read_checkpoint(folder)
    enter_stage(run, "dense")
    if checkpoint:
        restore(run, checkpoint)
    if ranks.rank() == 0:
        remove_temporary_files(folder)
        current = run.global_step(run.stage, run.step)
        rows = trim_metrics(folder, lambda stage, step: stage in STAGES and run.global_step(stage, step) <= current)
        run.rows, run.lost_rows = rows, run.rows - rows
    if ranks.rank() == 0:
        run.trackers = open_trackers(config, folder, run.global_step)
    return run


@contextmanager
def closing(run: Run) -> Iterator[None]:
    """Closes what the run holds open and drops references that would keep its model in memory.

    If the run fails, its own error is raised, not an error from closing a tracker, such as a full disk.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            _close(run)
        raise
    _close(run)


def _close(run: Run) -> None:
    trackers, run.trackers, run.graph = run.trackers, [], None
    with ExitStack() as stack:  # closes all of them, even if one raises
        for tracker in trackers:
            stack.callback(tracker.close)


def dense_weights(folder: Path, config: Config) -> Path | None:
    """The file given as ``--dense``, or the copy in the run folder if that file is gone."""
    if config.dense is None:
        return None
    path, copy = Path(config.dense), folder / run_files.DENSE
    return copy if copy.exists() and not path.exists() else path


def make_model(task: Task, config: Config, weights: Path | None, device: torch.device) -> nn.Module:
    """The configured network on the device, with the weights of a file or with its initial weights."""
    model = task.model(config.model)
    if weights is not None:
        load_weights(model, weights)
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def enter_stage(run: Run, stage: str) -> None:
    """Starts a stage with a new optimizer and a new average; the search attaches the pruner.

    The search has no average: its mask changes at every step, and the model is not evaluated.
    """
    config = run.config
    run.elapsed()
    run.stage, run.step, run.losses, run.loss, run.metric = stage, 0, torch.zeros_like(run.losses), None, None
    if stage != "dense" and run.pruner is None:
        run.pruner = attach_pruner(run.model, config, run.task, run.steps("search"), run.folder)
    run.optimizer = make_optimizer(run.model, config, stage, run.pruner)
    run.ema = Ema(run.model, config.ema) if config.ema and stage != "search" else None
    run.graph, run.forward = None, run.model
    if ranks.world_size() > 1 and config.parallel == "ddp":
        fixed_weights = run.pruner is not None and not run.pruner.capabilities.trains_weights
        run.forward = ranks.wrap_ddp(run.model, run.device, unused=fixed_weights and stage == "search")
    if config.compile == "on":
        run.forward = torch.compile(run.forward)  # type: ignore[assignment]
    if config.distill and stage != "dense":
        if run.teacher is None:
            with torch.random.fork_rng(devices=[]):
                dense = make_model(run.task, config, run.folder / run_files.DENSE, run.device)
            run.teacher = Teacher(dense, run.task.distance, config.distill, config.distill_temperature)  # type: ignore[attr-defined]
        run.teacher.attach(run.forward)
    run.graph = make_graph(run)


def data_of_stage(data: Data, config: Config, stage: str) -> Data:
    """The training data, augmented if the configuration asks for it in this stage."""
    stages = {"search": STAGES[1:2], "pruning": STAGES[1:], "all": STAGES}[config.augment_over]
    return Augmented(data, config.augment) if config.augment and stage in stages else data


def attach_pruner(model: nn.Module, config: Config, task: Task, steps: int, folder: Path | None = None) -> Pruner:
    """Attaches the configured method; ``steps`` is the length of the search.

    What a budget measures is kept in the folder, so that a resumed run has the same numbers.
    """
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise SmartpruneError(f"model={config.model!r} has no parameters to train or prune; give another model")
    example = task.example().to(parameter.device)
    name, share = config.budget_share
    table = config.cost_table
    layers: dict[str, Any] = {"floor": config.floor, "include": config.include, "skip": config.skip, "example": example}
    is_measured = folder is not None and "measured" in budget_fields(name)
    if table is None and folder is not None and is_measured:
        table = str(folder / run_files.LATENCY)
    budget = make_budget(name, share, example, config.npu, table)
    if is_measured and ranks.world_size() > 1:  # two ranks would measure different times: rank 0 writes the file first
        ranks.on_first(lambda: bool(plan(model, config.block, budget=budget, **layers).n))
    return attach(model, make_method(config.method, config.settings), block=config.block, budget=budget, steps=steps, **layers)


def save_checkpoint(run: Run) -> None:
    """Writes the checkpoint. It holds whole tensors and plain values and does not depend on the number of processes."""
    require_finite(run)
    run.elapsed()
    losses = torch.tensor(ranks.gather(float(run.losses)), dtype=torch.float64, device="cpu")
    sharded = sharding.is_sharded(next(run.model.parameters()))  # gathering whole tensors takes all ranks
    state = to_cpu(_state(run) | {"losses": losses}) if sharded or ranks.rank() == 0 else {}
    ranks.on_first(lambda: write_checkpoint(run.folder, state))


def _state(run: Run) -> dict[str, Any]:
    return {
        "version": 1,
        "settings": json.dumps(training_settings(run.config)),
        "stage": run.stage,
        "step": run.step,
        "rows": run.rows,
        "dense": run.dense,
        "also": run.other_metrics,
        "loss": run.loss,
        "value": run.metric,
        "seconds": dict(run.seconds),
        "model": dict(run.model.state_dict()),
        "average": None if run.ema is None else run.ema.state(),
        "optimizer": run.optimizer.state_dict(),
        "pruner": None if run.pruner is None else run.pruner.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state() if run.device.type == "cuda" else None,
    }


def restore(run: Run, state: dict[str, Any]) -> None:
    """Restores a new run from a checkpoint, which may come from another number of processes."""
    path = run.folder / run_files.CHECKPOINT
    _require_same_settings(run, state, path)
    try:
        enter_stage(run, state["stage"])
        run.model.load_state_dict(sharding.shard_state(state["model"], run.model.state_dict()))
        if run.pruner is not None:
            run.pruner.load_state_dict(state["pruner"])
        run.optimizer.load_state_dict(_sharded_state(state["optimizer"], run.optimizer))
        if run.ema is not None:
            run.ema.load_state(state["average"])
        run.step, run.rows, run.dense = state["step"], state["rows"], state["dense"]
        run.loss, run.metric, run.other_metrics = state["loss"], state["value"], state["also"]
        run.seconds.update(state["seconds"])
        losses = state["losses"].reshape(-1)
        run.losses.copy_(losses[ranks.rank()] if len(losses) == ranks.world_size() else losses.mean())
        torch.set_rng_state(state["random"])
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_cuda"])
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise SmartpruneError(
            f"{path} does not fit {run_files.CONFIG} beside it ({first_line(error)}); delete it to restart the run"
        ) from None


def _require_same_settings(run: Run, state: dict[str, Any], path: Path) -> None:
    """Other settings would make a run that no ``config.json`` describes."""
    saved = state.get("settings")
    values = parse_json(saved, str(path)) if isinstance(saved, str) else None
    if not isinstance(values, dict):
        raise SmartpruneError(f"{path} is damaged (its settings cannot be read); delete it to restart the run")
    if changed := changed_settings(values, run.config):
        raise SmartpruneError(
            f"{run.folder / run_files.CONFIG} was changed after the run began: {', '.join(changed)}; restore these values to "
            "resume, or start a new run"
        )


def _sharded_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state of whole tensors, sharded like the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {
        index: {name: sharding.shard_like(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": sharded}


def averaged_weights(run: Run) -> Any:
    """A context in which the model has its averaged weights, if the run keeps an average."""
    return nullcontext() if run.ema is None else run.ema.swapped_in()
