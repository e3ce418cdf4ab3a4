"""The whole job in one loop: dense training, search, fine-tuning, bake, receipt, verification.

A run can be killed at any moment. It depends on its ``config.json`` and, from the last checkpoint on, on numbers that
are functions of (seed, epoch, step); so a resumed run ends with the very weights of one that was never interrupted.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import torch

from . import config as configs
from . import rundir
from .config import Config
from .errors import SmartpruneError
from .graph import capturable
from .progress import Tick
from .pruner import bake
from .run import STAGES, Run, enter, prune, put_away, require_finite, settled, start, take_step
from .tasks import Data
from .verify import verify

SHOW_SECONDS = 0.25  # between ticks
TELEMETRY = ("tau", "theta", "undecided", "changed", "gap", "kept", "collapsed")  # of the search, in every row
CHECKPOINT_SHARE = 0.05  # checkpoints take at most about this share of the time


@dataclass(frozen=True)
class Result:
    """What a finished run is judged by; the metric is that of the test split. Kept as ``result.json``."""

    folder: str
    task: str
    model: str
    method: str
    measure: str
    dense: float
    pruned: float
    verified: bool
    seconds: float
    stage_seconds: dict[str, float]
    versions: dict[str, str]

    @staticmethod
    def load(folder: str | Path) -> Result:
        path = Path(folder) / rundir.RESULT
        try:
            values = json.loads(path.read_text())
            return Result(**{f.name: values[f.name] for f in fields(Result)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SmartpruneError(f"{path} cannot be read as a result ({error})") from None


def _ignore(tick: Tick) -> None: ...


def _never() -> bool:
    return False


def train(config: Config, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never) -> Result:
    """Starts a run in the new folder ``config.out`` and takes it to the end. ``stop`` is asked after every step."""
    check(config)
    config = resolved(config)
    return _work(rundir.create(config), config, progress, stop)


def resume(folder: str | Path, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never) -> Result:
    """Continues the run in a folder with the settings it was started with. A finished run is left as it is."""
    folder = Path(folder)
    if not (folder / rundir.CONFIG).exists():
        raise SmartpruneError(f"{folder} holds no run (no {rundir.CONFIG}); start one without --resume")
    if (folder / rundir.RESULT).exists():
        return Result.load(folder)
    return _work(folder, resolved(configs.load(folder / rundir.CONFIG)), progress, stop)


def check(config: Config) -> None:
    """Raises now what would otherwise come up after the dense stage, such as a budget that cannot be met."""
    if not config.out:
        raise SmartpruneError("out is empty; give a folder for the run")
    resolved(config)
    with torch.random.fork_rng(devices=[]):
        task = configs.make_task(config.task, config.task_settings)
        model = task.model(config.model)
        if config.dense is not None:
            rundir.load_weights(model, Path(config.dense))
        steps = config.search_epochs * task.data("train", torch.device("cpu")).steps(config.batch)
        reason = capturable(prune(model, config, task, steps).method)
    if config.graph == "on" and reason is not None:
        raise SmartpruneError(f"graph='on': {reason}; use --graph off or auto")


def resolved(config: Config) -> Config:
    """The configuration with what is left to the machine decided."""
    found = torch.cuda.is_available()
    device = config.device if config.device != "auto" else "cuda" if found else "cpu"
    if device == "cuda" and not found:
        raise SmartpruneError("device='cuda', but torch finds no CUDA device here; use --device cpu or auto")
    if device != "cuda" and config.graph == "on":
        raise SmartpruneError("graph='on' needs a CUDA device; use --graph off or auto")
    amp = config.amp if config.amp != "auto" else "bf16" if device == "cuda" else "off"
    return replace(config, device=device, amp=amp)


def _work(folder: Path, config: Config, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> Result:
    with rundir.locked(folder), settled(config):
        run = start(folder, config)
        for stage in STAGES[STAGES.index(run.stage) :]:
            if stage != run.stage:
                enter(run, stage)
            _train_stage(run, progress, stop)
            if stage == "dense":
                run.dense = evaluate(run, run.task.data("test", run.device))
                rundir.save_weights(run.model, folder / rundir.DENSE)
        return _finish(run)


def _train_stage(run: Run, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> None:
    total = run.steps(run.stage)
    saved, cost, shown = time.monotonic(), 0.0, 0.0
    while run.step < total:
        for batch in run.training.batches(run.config.batch, run.config.seed, run.epoch, run.step % run.per_epoch):
            take_step(run, batch)
            if run.step % run.per_epoch == 0:
                _end_epoch(run)
            now = time.monotonic()
            if now - shown > SHOW_SECONDS or run.step == total:
                progress(_tick(run))
                shown = now
            stopped = stop()
            wait = max(run.config.checkpoint_seconds, cost / CHECKPOINT_SHARE) if run.config.checkpoint_seconds else 0.0
            if stopped or run.step == total or now - saved >= wait:
                put_away(run)
                saved = time.monotonic()
                cost = saved - now
            if stopped:
                raise SmartpruneError(
                    f"stopped in {run.stage}, after step {run.step} of {total}; "
                    f"continue with: smartprune train --resume --out {run.folder}"
                )


def _end_epoch(run: Run) -> None:
    """One row of metrics. The search shows no metric: its batch-norm statistics are those of the soft mask. Nor does a
    run that holds out no validation data."""
    require_finite(run)
    run.loss = float(run.losses) / run.per_epoch
    held_out = run.validation.steps(run.config.batch) > 0
    run.value = evaluate(run, run.validation) if held_out and run.stage != "search" else None
    row: dict[str, object] = {
        "stage": run.stage,
        "epoch": run.step // run.per_epoch,
        "step": run.step,
        "loss": run.loss,
        run.task.measure: run.value,
        "lr": float(run.optimizer.param_groups[0]["lr"]),
    }
    if run.stage == "search" and run.pruner is not None:
        told = run.pruner.telemetry()
        row |= {name: told[name] for name in TELEMETRY}
    if run.graph is not None and run.graph.failed is not None:
        row["graph"] = f"off: {run.graph.failed}"
    rundir.append_row(run.folder, row | {"seconds": round(run.tell_time(), 3)})
    run.rows += 1
    run.losses.zero_()


def evaluate(run: Run, data: Data) -> float:
    """The task's metric of the model as it is."""
    run.model.eval()
    try:
        with torch.no_grad():
            return run.task.metric(run.model, data)
    finally:
        run.model.train()


def _tick(run: Run) -> Tick:
    searching = run.stage == "search" and run.pruner is not None
    told = run.pruner.telemetry() if run.pruner is not None and searching else {}
    tau, undecided = told.get("tau"), told.get("undecided")
    taken = run.step % run.per_epoch
    before = sum(run.steps(stage) for stage in STAGES[: STAGES.index(run.stage)])
    return Tick(
        stage=run.stage,
        step=run.step,
        steps=run.steps(run.stage),
        done=before + run.step,
        total=sum(map(run.steps, STAGES)),
        loss=float(run.losses) / taken if taken else run.loss,
        measure=run.task.measure,
        value=run.value,
        tau=tau if isinstance(tau, float) else None,
        undecided=undecided if isinstance(undecided, int) else None,
        seconds=run.tell_time(),
    )


def _finish(run: Run) -> Result:
    """Bake, judge, write, verify. Killed in the middle, it is done again from the last checkpoint."""
    folder, config = run.folder, run.config
    receipt = bake(run.model)
    pruned = evaluate(run, run.task.data("test", run.device))
    rundir.save_weights(run.model, folder / rundir.MODEL)
    receipt.save(folder / rundir.RECEIPT)
    found = verify(folder / rundir.MODEL, receipt=folder / rundir.RECEIPT)
    if not found.ok:
        raise SmartpruneError(f"{folder / rundir.MODEL} is not what its receipt says:\n{found}")
    seconds = run.tell_time()
    result = Result(
        folder=str(folder),
        task=config.task,
        model=config.model,
        method=config.method,
        measure=run.task.measure,
        dense=run.dense,
        pruned=pruned,
        verified=True,
        seconds=round(seconds, 3),
        stage_seconds={stage: round(value, 3) for stage, value in run.seconds.items()},
        versions=versions(config),
    )
    rundir.write_json(folder / rundir.RESULT, asdict(result))
    return result


def versions(config: Config) -> dict[str, str]:
    """What the numbers were made with."""
    try:
        own = metadata.version("smartprune")
    except metadata.PackageNotFoundError:
        own = "unknown"
    where = torch.cuda.get_device_name() if config.device == "cuda" else platform.processor() or platform.machine()
    return {
        "smartprune": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": where,
        "threads": str(config.threads or torch.get_num_threads()),
    }
