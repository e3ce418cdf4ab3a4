"""The training loop: dense training, search, fine-tuning, bake, receipt and verification.

A run can be killed at any moment. It depends only on its ``config.json`` and, after the last checkpoint, on numbers that
are functions of seed, epoch and step. So a resumed run ends with the same weights, bit for bit.
"""

from __future__ import annotations

import errno
import hashlib
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import run_files
from ..artifacts.receipt import Receipt
from ..artifacts.verify import verify
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from ..models.named import is_external
from ..pruning.bake import bake
from ..run_files import STAGES, TELEMETRY
from ..tasks import Data
from . import ranks
from .check import check, resolve
from .command import train_command
from .config import Config, load_config
from .evaluate import evaluate, write_detections
from .folder import append_row, create_folder, first_line, locked, save_weights, write_json
from .history import mask_sample, save_scores
from .outputs import write_outputs
from .page import write_run_page
from .progress import Tick
from .result import Result, versions
from .run import Run, averaged_weights, closing, deterministic, enter_stage, save_checkpoint, start_run
from .step import require_finite, steps_of_epoch, take_step
from .trust import check_trusted

TICK_SECONDS = 0.25  # least time between two ticks
CHECKPOINT_SHARE = 0.05  # checkpoints take at most about this share of the time
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def _ignore(tick: Tick) -> None: ...


def _never() -> bool:
    return False


def train(config: Config, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never) -> Result:
    """Starts a run in the new folder ``config.out`` and finishes it. ``stop`` is called after every step."""
    check(config)
    with ranks.process_group(resolve(config).device):
        config = ranks.on_first(lambda: resolve(config))
        return _run(ranks.on_first(lambda: create_folder(config)), config, progress, stop)


def resume(
    folder: str | Path, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never, trust: bool = False
) -> Result:
    """Continues the run in a folder with its original settings. A finished run is not changed.

    Raises if the settings name a function to import, unless ``trust`` is true.
    """
    folder = Path(folder)
    if not (folder / run_files.CONFIG).exists():
        raise SmartpruneError(f"{folder} holds no run (no {run_files.CONFIG}); start one without --resume")
    if (folder / run_files.RESULT).exists():
        result = Result.load(folder)
        if not (folder / run_files.PAGE).exists():  # the process was killed between the two
            write_run_page(folder, trusted=trust)
        return result
    config = resolve(load_config(folder / run_files.CONFIG))
    check_trusted(config.model, folder / run_files.CONFIG, trust=trust, remedy="trust=True")
    with ranks.process_group(config.device):
        return _run(folder, config, progress, stop)


def train_dense(
    folder: Path, config: Config | None, progress: Callable[[Tick], None], stop: Callable[[], bool], trust: bool = False
) -> Path:
    """The dense stage of a new run, or without a configuration of the run in the folder. Returns the file of the dense model.

    ``trust`` has the meaning that it has in :func:`resume`.
    """
    is_new = config is not None
    settings = load_config(folder / run_files.CONFIG) if config is None else config
    if config is None:
        check_trusted(settings.model, folder / run_files.CONFIG, trust=trust, remedy="trust=True")
    if is_new:
        check(settings)
    with ranks.process_group(resolve(settings).device):
        resolved = ranks.on_first(lambda: resolve(settings))
        if is_new:
            ranks.on_first(lambda: create_folder(resolved))
        with _running(folder, resolved, progress) as run:
            if run.stage == STAGES[0]:
                _train_dense(run, progress, stop)
    return folder / run_files.DENSE


def _run(folder: Path, config: Config, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> Result:
    with _running(folder, config, progress) as run:
        for stage in STAGES[STAGES.index(run.stage) :]:
            if stage != run.stage:
                enter_stage(run, stage)
            if stage == STAGES[0]:
                _train_dense(run, progress, stop)
                continue
            _train_stage(run, progress, stop)
            if run.ema is not None:
                run.ema.copy_to_model()
            if stage == "search" and run.pruner is not None:
                ranks.require_equal("the mask", _digest(run.pruner.mask))
        return _finish(run, progress)


@contextmanager
def _running(folder: Path, config: Config, progress: Callable[[Tick], None]) -> Iterator[Run]:
    """The run in a folder, at its beginning or at its last checkpoint. The folder is locked for other processes."""
    with locked(folder) if ranks.rank() == 0 else nullcontext(), deterministic(config), _explain_full_disk(folder):
        run = start_run(folder, config)
        if run.lost_rows:
            _warn(
                progress,
                f"{folder / run_files.METRICS} has lost {run.lost_rows} rows; the run continues, and its curves have gaps",
            )
        with closing(run):
            yield run


def _train_dense(run: Run, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> None:
    """The dense stage, the test of its model, and its file."""
    _train_stage(run, progress, stop)
    if run.ema is not None:
        run.ema.copy_to_model()
    _busy(progress, "testing the dense model")
    run.dense = _test(run, "dense")
    save_weights(run.model, run.folder / run_files.DENSE)


@contextmanager
def _explain_full_disk(folder: Path) -> Iterator[None]:
    """Adds to the error of a full disk how to continue the run."""
    try:
        yield
    except (SmartpruneError, OSError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError) or reason.errno not in DISK_FULL:
            raise
        raise SmartpruneError(
            f"{error}; free some space, then continue with: smartprune train --resume --out {shlex.quote(str(folder))}"
        ) from reason


def _warn(progress: Callable[[Tick], None], text: str) -> None:
    """Prints a message between the ticks if ``progress`` can do that; else warns."""
    message = getattr(progress, "message", None)
    if message is None:
        warnings.warn(text, stacklevel=6)
    else:
        message(text)


def _busy(progress: Callable[[Tick], None], text: str) -> None:
    """Says what happens between the stages if ``progress`` can show that."""
    busy = getattr(progress, "busy", None)
    if busy is not None:
        busy(text)


def _train_stage(run: Run, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> None:
    total = run.steps(run.stage)
    last_save, save_cost, last_tick = time.monotonic(), 0.0, 0.0
    while run.step < total:
        for batches in steps_of_epoch(run):
            _take_step(run, batches)
            if run.step % run.steps_per_epoch == 0:
                _end_epoch(run)
            now = time.monotonic()
            if ranks.rank() == 0 and (now - last_tick > TICK_SECONDS or run.step == total):
                progress(_tick(run))
                last_tick = now
            seconds = run.config.checkpoint_seconds
            wait = max(seconds, save_cost / CHECKPOINT_SHARE) if seconds else 0.0
            stopped, due = ranks.any_rank(stop(), now - last_save >= wait)
            if stopped or due or run.step == total:
                save_checkpoint(run)
                last_save = time.monotonic()
                save_cost = last_save - now
            if stopped:
                raise SmartpruneError(
                    f"stopped in {run.stage}, after step {run.step} of {total}; "
                    f"continue with: smartprune train --resume --out {shlex.quote(str(run.folder))}"
                )


def _take_step(run: Run, batches: tuple[Any, ...]) -> None:
    """One step. If the first step of an external model fails, the error says what the model must accept and return."""
    try:
        take_step(run, *batches)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        if run.step or not is_external(run.config.model):
            raise
        raise SmartpruneError(
            f"model={run.config.model!r}: its first step on {run.config.task} failed ({type(error).__name__}: "
            f"{first_line(error)}); its inputs and outputs must be those of the task's own model, {run.task.recipe.model}"
        ) from error


def _end_epoch(run: Run) -> None:
    """Writes a row of metrics. In the search, the metric is measured with the soft mask. It is missing without validation data."""
    require_finite(run)
    run.loss = statistics.fmean(ranks.gather(float(run.losses))) / run.batches_per_epoch
    has_validation = run.validation.steps(run.config.batch) > 0
    with averaged_weights(run):
        run.metric = _validate(run, run.validation) if has_validation else None
    row: dict[str, object] = {
        "stage": run.stage,
        "epoch": run.step // run.steps_per_epoch,
        "step": run.step,
        "loss": run.loss,
        run.task.measure: run.metric,
        "lr": float(run.optimizer.param_groups[0]["lr"]),
    }
    if run.stage == "search" and run.pruner is not None:
        telemetry = run.pruner.telemetry()
        row |= {name: telemetry[name] for name in TELEMETRY} | {"sample": mask_sample(run.pruner)}
        if run.step == run.steps("search"):
            save_scores(run.pruner, run.folder)
    if run.graph is not None and run.graph.failed is not None:
        row["graph"] = f"off: {run.graph.failed}"
    row["seconds"] = round(run.elapsed(), 3)
    ranks.on_first(lambda: append_row(run.folder, row))
    for tracker in run.trackers:
        tracker.add(row)
    run.rows += 1
    run.losses.zero_()


def _test(run: Run, form: str) -> float | None:
    """The metric of the ``"dense"`` or ``"pruned"`` model on the test split. Detections are written to the run folder."""
    metrics, detections, run.test_samples = evaluate(run.task, run.model, "test", run.device)
    if detections is not None:
        ranks.on_first(lambda: write_detections(run.folder / run_files.DETECTIONS[form], detections))
    metrics = ranks.on_first(lambda: metrics)
    run.other_metrics[form] = {name: value for name, value in metrics.items() if name != run.task.measure}
    return metrics[run.task.measure]


def _validate(run: Run, data: Data) -> float | None:
    """The metric of the current model. Every rank evaluates all of the data; the value of rank 0 is used."""
    run.model.eval()
    try:
        with torch.no_grad():
            value = run.task.metric(run.model, data)
    finally:
        run.model.train()
    return ranks.on_first(lambda: value)


def _tick(run: Run) -> Tick:
    telemetry = run.pruner.telemetry() if run.pruner is not None and run.stage == "search" else {}
    tau, undecided = telemetry.get("tau"), telemetry.get("undecided")
    return Tick(
        stage=run.stage,
        step=run.step,
        steps=run.steps(run.stage),
        done=run.global_step(run.stage, run.step),
        total=run.total_steps,
        loss=float(run.losses) / run.batches_done if run.batches_done else run.loss,
        measure=run.task.measure,
        metric=run.metric,
        tau=tau if isinstance(tau, float) else None,
        undecided=undecided if isinstance(undecided, int) else None,
        seconds=run.elapsed(),
        empty_layers=len(telemetry["collapsed"]) if telemetry.get("phase") == "frozen" else 0,
        epoch=-(-run.step // run.steps_per_epoch),
        epochs=run.epochs(run.stage),
    )


def _finish(run: Run, progress: Callable[[Tick], None]) -> Result:
    """Bakes, tests, writes and verifies the model. If it is killed, all of it is repeated from the last checkpoint."""
    example = None if is_sharded(next(run.model.parameters())) else run.task.example().to(run.device)
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always", UserWarning)
        receipt = bake(run.model, example=example)
    for problem in problems if ranks.rank() == 0 else ():
        _warn(progress, str(problem.message))
    ranks.require_equal("the removed blocks", receipt.mask_hash)
    _busy(progress, "testing the pruned model")
    pruned = _test(run, "pruned")
    _busy(progress, "writing, verifying and exporting the pruned model")
    save_weights(run.model, run.folder / run_files.MODEL)
    return ranks.on_first(lambda: _write_result(run, receipt, pruned))


def _write_result(run: Run, receipt: Receipt, pruned: float | None) -> Result:
    folder, config = run.folder, run.config
    receipt.save(folder / run_files.RECEIPT)
    verification = verify(folder / run_files.MODEL, receipt=folder / run_files.RECEIPT)
    if not verification.ok:
        raise SmartpruneError(f"{folder / run_files.MODEL} does not match its receipt:\n{verification}")
    files = {**write_outputs(folder, config, run.task, receipt), "page": f"{run_files.PAGE}, open it in a browser"}
    seconds = run.elapsed()
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
        also=run.other_metrics,
        files=files,
        samples=run.test_samples,
        finished=time.strftime("%Y-%m-%d %H:%M"),
        command=train_command(config),
    )
    write_json(folder / run_files.RESULT, asdict(result))
    write_run_page(folder, trusted=True)
    for tracker in run.trackers:
        tracker.finish(folder, run.total_steps)
    return result


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
