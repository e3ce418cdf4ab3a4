"""The whole job in one loop: dense training, search, fine-tuning, bake, receipt, verification.

A run can be killed at any moment. It depends on its ``config.json`` and, from the last checkpoint on, on numbers that
are functions of (seed, epoch, step); so a resumed run ends with the very weights of one that was never interrupted.
"""

from __future__ import annotations

import errno
import hashlib
import platform
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import run_files
from ..artifacts.receipt import Receipt
from ..artifacts.verify import verify
from ..errors import SmartpruneError, explain_memory_errors
from ..fields import MAX_TEXT, Fields, is_valid_name
from ..files import parse_json, read_limited
from ..hardware.npu import read_npu
from ..methods import capabilities
from ..models.named import is_external
from ..pruning.pruner import bake
from ..run_files import STAGES
from ..tasks import Data
from ..text import shorten
from . import config as configs
from . import ranks
from . import trackers as events
from .config import Config
from .evaluate import Figures, judge, write_found
from .folder import append_row, create_folder, first_line, load_weights, locked, save_weights, write_json
from .history import mask_sample, save_scores
from .outputs import deliver, require
from .page import write_run_page
from .progress import Tick
from .run import Run, averaged, closing, enter, prune, put_away, settled, shown, start
from .step import require_finite, steps_of_epoch, take_step

SHOW_SECONDS = 0.25  # between ticks
TELEMETRY = ("tau", "theta", "undecided", "changed", "gap", "kept", "collapsed")  # of the search, in every row
CHECKPOINT_SHARE = 0.05  # checkpoints take at most about this share of the time
LARGEST_RESULT = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Result:
    """What a finished run is judged by; the metric is that of the test split. Kept as ``result.json``."""

    folder: str
    task: str
    model: str
    method: str
    measure: str
    dense: float | None  # None: not scored yet; ``smartprune eval`` does it
    pruned: float | None
    verified: bool
    seconds: float
    stage_seconds: dict[str, float]
    versions: dict[str, str]
    also: dict[str, Figures] = field(default_factory=dict)  # other figures than the measure, of "dense" and "pruned"
    files: dict[str, str] = field(default_factory=dict)  # what else was written, and what is in it

    def shown(self, form: str) -> str:
        """The metric of ``"dense"`` or ``"pruned"`` in percent, with other figures and the change by pruning."""
        value, change = {"dense": (self.dense, None), "pruned": (self.pruned, self.dense)}[form]
        if value is None:
            return (
                f"not scored yet; what judges it is not installed here. Score it with: smartprune eval {shlex.quote(self.folder)}"
            )
        notes = [f"{100 * (value - change):+.2f} points"] if change is not None else []
        notes += [f"{name} {100 * other:.2f} %" for name, other in self.also.get(form, {}).items() if other is not None]
        return f"{100 * value:.2f} %" + (f" ({', '.join(notes)})" if notes else "")

    @staticmethod
    def load(folder: str | Path) -> Result:
        """Reads a ``result.json``, every value by its type."""
        path = Path(folder) / run_files.RESULT
        data = read_limited(path, LARGEST_RESULT)
        try:
            found = Fields(parse_json(data, str(path)), str(path))
            stages, versions = found.nested("stage_seconds"), found.nested("versions")
            also, files = (found.nested(name) if name in found.data else Fields({}, name) for name in ("also", "files"))
            return Result(
                folder=found.string("folder"),
                task=found.string("task"),
                model=found.string("model"),
                method=found.string("method"),
                measure=found.string("measure"),
                dense=_figure(found, "dense"),
                pruned=_figure(found, "pruned"),
                verified=found.boolean("verified"),
                seconds=found.number("seconds"),
                stage_seconds={name: stages.number(name) for name in stages.data},
                versions={name: versions.string(name) for name in versions.data},
                also={form: {name: _figure(also.nested(form), name) for name in also.nested(form).data} for form in also.data},
                files={name: files.string(name) for name in files.data},
            )
        except SmartpruneError as error:
            raise SmartpruneError(
                f"{error}. {run_files.RESULT} cannot be used: delete it, and the run is finished once more, from its last "
                f"checkpoint, by: smartprune train --resume --out {shlex.quote(str(folder))}"
            ) from None


def _figure(found: Fields, name: str) -> float | None:
    """A number, or None where it is not known."""
    return None if found.raw(name) is None else found.number(name)


def _ignore(tick: Tick) -> None: ...


def _never() -> bool:
    return False


def train(config: Config, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never) -> Result:
    """Starts a run in the new folder ``config.out`` and takes it to the end. ``stop`` is asked after every step."""
    check(config)
    with ranks.joined(resolved(config).device):
        config = ranks.first(lambda: resolved(config))
        return _work(ranks.first(lambda: create_folder(config)), config, progress, stop)


def resume(folder: str | Path, progress: Callable[[Tick], None] = _ignore, stop: Callable[[], bool] = _never) -> Result:
    """Continues the run in a folder with the settings it was started with. A finished run is left as it is."""
    folder = Path(folder)
    if not (folder / run_files.CONFIG).exists():
        raise SmartpruneError(f"{folder} holds no run (no {run_files.CONFIG}); start one without --resume")
    if (folder / run_files.RESULT).exists():
        result = Result.load(folder)
        if not (folder / run_files.PAGE).exists():  # killed between the two
            write_run_page(folder, own=True)
        return result
    config = resolved(configs.load(folder / run_files.CONFIG))
    with ranks.joined(config.device):
        return _work(folder, config, progress, stop)


def check(config: Config) -> None:
    """Raises now what would otherwise come up after the dense stage, such as a budget that cannot be met."""
    if not config.out:
        raise SmartpruneError("out is empty; give a folder for the run")
    require(config)
    resolved(config)
    read_npu(config.npu)
    if config.tensorboard == "on":
        events.require()
    with torch.random.fork_rng(devices=[]):
        task = configs.make_task(config.task, config.task_settings)
        with explain_memory_errors(network(config)):
            model = task.model(config.model)
        _check_names(model, config)
        if config.dense is not None:
            load_weights(model, Path(config.dense))
        data, *_ = (task.data(split, torch.device("cpu")) for split in ("train", "validation", "test"))
        ranks.require_shares(data, config.batch)
        if config.augment:
            next(shown(data, config, "search").batches(config.batch, config.seed, 0))
        steps = config.search_epochs * -(-data.steps(config.batch) // config.accumulate)
        with explain_memory_errors(network(config)):
            needs = capabilities(prune(model, config, task, steps).method)
    if config.parallel == "fsdp" and ranks.world() > 1 and needs.needs_whole_weights:
        raise SmartpruneError(f"parallel='fsdp': {config.method} needs whole weights in every step; use --parallel ddp")
    if config.distill:
        if not hasattr(task, "distance"):
            raise SmartpruneError(
                f"distill={config.distill:g}: {config.task} does not say how far two outputs are apart; use --distill 0"
            )
        if config.dense is None and not config.dense_epochs:
            raise SmartpruneError(
                f"distill={config.distill:g} needs a trained dense model; give --dense FILE, or --dense-epochs above 0"
            )
    if config.graph == "on" and needs.why_not_capturable is not None:
        raise SmartpruneError(f"graph='on': {config.method}: {needs.why_not_capturable}; use --graph off or auto")


def network(config: Config) -> str:
    """The network as it was asked for."""
    settings = "".join(f" --task-set {name}={value}" for name, value in config.task_settings.items() if value is not None)
    return f"--model {config.model}{settings}"


def _check_names(model: nn.Module, config: Config) -> None:
    """Refuses names that the files at the end of a run cannot hold."""
    for name in model.state_dict():
        if not is_valid_name(name):
            raise SmartpruneError(
                f"model={config.model!r}: {shorten(name, 100)!r} is a name that a packed file cannot hold; give that part of the "
                f"model one of at most {MAX_TEXT} characters, all of which print"
            )


def resolved(config: Config) -> Config:
    """The configuration with what is left to the machine decided."""
    found = torch.cuda.is_available()
    device = config.device if config.device != "auto" else "cuda" if found else "cpu"
    if device == "cuda" and not found:
        raise SmartpruneError("device='cuda', but torch finds no CUDA device here; use --device cpu or auto")
    if device != "cuda" and config.graph == "on":
        raise SmartpruneError("graph='on' needs a CUDA device; use --graph off or auto")
    if ranks.world() > 1 and config.graph == "on":
        raise SmartpruneError(f"graph='on' is for one process, and these are {ranks.world()}; use --graph off or auto")
    if ranks.world() > 1 and config.sync_bn == "on" and device != "cuda":
        raise SmartpruneError("sync_bn='on' needs GPUs: torch has no such batch norm for the CPU; use --sync-bn off")
    amp = config.amp if config.amp != "auto" else "bf16" if device == "cuda" else "off"
    return replace(config, device=device, amp=amp, threads=config.threads or torch.get_num_threads())


def _work(folder: Path, config: Config, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> Result:
    with locked(folder) if ranks.rank() == 0 else nullcontext(), settled(config), _told_to_go_on(folder):
        run = start(folder, config)
        if run.lost:
            _say(progress, f"{run.lost} rows of {folder / run_files.METRICS} are lost; the run goes on, and its curves have gaps")
        with closing(run):
            for stage in STAGES[STAGES.index(run.stage) :]:
                if stage != run.stage:
                    enter(run, stage)
                _train_stage(run, progress, stop)
                if run.average is not None:
                    run.average.put_in()  # the model from here on
                if stage == "dense":
                    run.dense = result_of(run, "dense")
                    save_weights(run.model, folder / run_files.DENSE)
                elif stage == "search" and run.pruner is not None:
                    ranks.require_same("the mask", digest(run.pruner.mask))
            return _finish(run)


@contextmanager
def _told_to_go_on(folder: Path) -> Iterator[None]:
    """Says how a run goes on that a full disk has stopped."""
    try:
        yield
    except (SmartpruneError, OSError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError) or reason.errno not in FULL:
            raise
        raise SmartpruneError(
            f"{error}; free some space, then continue with: smartprune train --resume --out {shlex.quote(str(folder))}"
        ) from reason


def _say(progress: Callable[[Tick], None], text: str) -> None:
    """Tells what is no tick, where there is somebody who can be told."""
    say = getattr(progress, "say", None)
    if say is None:
        warnings.warn(text, stacklevel=4)
    else:
        say(text)


def _train_stage(run: Run, progress: Callable[[Tick], None], stop: Callable[[], bool]) -> None:
    total = run.steps(run.stage)
    saved, cost, shown = time.monotonic(), 0.0, 0.0
    while run.step < total:
        for batches in steps_of_epoch(run):
            try:
                take_step(run, *batches)
            except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
                if run.step or not is_external(run.config.model):
                    raise
                raise SmartpruneError(
                    f"model={run.config.model!r}: its first step on {run.config.task} failed ({type(error).__name__}: "
                    f"{first_line(error)}); it has to take and give what the task's own, {run.task.recipe.model}, does"
                ) from error
            if run.step % run.per_epoch == 0:
                _end_epoch(run)
            now = time.monotonic()
            if ranks.rank() == 0 and (now - shown > SHOW_SECONDS or run.step == total):
                progress(_tick(run))
                shown = now
            wait = max(run.config.checkpoint_seconds, cost / CHECKPOINT_SHARE) if run.config.checkpoint_seconds else 0.0
            stopped, due = ranks.any_of(stop(), now - saved >= wait)
            if stopped or due or run.step == total:
                put_away(run)
                saved = time.monotonic()
                cost = saved - now
            if stopped:
                raise SmartpruneError(
                    f"stopped in {run.stage}, after step {run.step} of {total}; "
                    f"continue with: smartprune train --resume --out {shlex.quote(str(run.folder))}"
                )


def _end_epoch(run: Run) -> None:
    """One row of metrics. The search shows no metric: its batch-norm statistics are those of the soft mask. Nor does a
    run that holds out no validation data."""
    require_finite(run)
    run.loss = statistics.fmean(ranks.gathered(float(run.losses))) / run.batches
    held_out = run.validation.steps(run.config.batch) > 0
    with averaged(run):
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
        row |= {name: told[name] for name in TELEMETRY} | {"sample": mask_sample(run.pruner)}
        if run.step == run.steps("search"):
            save_scores(run.pruner, run.folder)
    if run.graph is not None and run.graph.failed is not None:
        row["graph"] = f"off: {run.graph.failed}"
    row["seconds"] = round(run.tell_time(), 3)
    ranks.first(lambda: append_row(run.folder, row))
    if run.events is not None:
        run.events.add(row)
    run.rows += 1
    run.losses.zero_()


def result_of(run: Run, form: str) -> float | None:
    """The metric of the dense or the pruned model on the test split; what it found there is kept beside the run."""
    figures, found = judge(run.task, run.model, "test", run.device)
    if found is not None:
        ranks.first(lambda: write_found(run.folder / run_files.DETECTIONS[form], found))
    figures = ranks.first(lambda: figures)
    run.also[form] = {name: value for name, value in figures.items() if name != run.task.measure}
    return figures[run.task.measure]


def evaluate(run: Run, data: Data) -> float | None:
    """The task's metric of the model as it is. Of several processes each judges all of the data; the first one's counts."""
    run.model.eval()
    try:
        with torch.no_grad():
            value = run.task.metric(run.model, data)
    finally:
        run.model.train()
    return ranks.first(lambda: value)


def _tick(run: Run) -> Tick:
    searching = run.stage == "search" and run.pruner is not None
    told = run.pruner.telemetry() if run.pruner is not None and searching else {}
    tau, undecided = told.get("tau"), told.get("undecided")
    return Tick(
        stage=run.stage,
        step=run.step,
        steps=run.steps(run.stage),
        done=run.done(run.stage, run.step),
        total=sum(map(run.steps, STAGES)),
        loss=float(run.losses) / run.seen if run.seen else run.loss,
        measure=run.task.measure,
        value=run.value,
        tau=tau if isinstance(tau, float) else None,
        undecided=undecided if isinstance(undecided, int) else None,
        seconds=run.tell_time(),
        empty=len(told["collapsed"]) if told.get("phase") == "frozen" else 0,
    )


def _finish(run: Run) -> Result:
    """Bake, judge, write, verify. Killed in the middle, it is done again from the last checkpoint."""
    receipt = bake(run.model)
    ranks.require_same("the blocks removed", receipt.mask_hash)
    pruned = result_of(run, "pruned")
    save_weights(run.model, run.folder / run_files.MODEL)
    return ranks.first(lambda: _write_down(run, receipt, pruned))


def _write_down(run: Run, receipt: Receipt, pruned: float | None) -> Result:
    folder, config = run.folder, run.config
    receipt.save(folder / run_files.RECEIPT)
    found = verify(folder / run_files.MODEL, receipt=folder / run_files.RECEIPT)
    if not found.ok:
        raise SmartpruneError(f"{folder / run_files.MODEL} is not what its receipt says:\n{found}")
    files = {**deliver(folder, config, run.task, receipt), "page": f"{run_files.PAGE}, for a browser"}
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
        also=run.also,
        files=files,
    )
    write_json(folder / run_files.RESULT, asdict(result))
    write_run_page(folder, own=True)
    if run.events is not None:
        run.events.draw(folder, sum(map(run.steps, STAGES)))
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
        "processes": str(ranks.world()),
    }


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
