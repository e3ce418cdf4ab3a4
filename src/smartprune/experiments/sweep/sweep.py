"""A grid of runs on one machine: one process per run, several at once, resumable after any interruption.

Every job writes to a log that stays locked while the job runs. A restarted sweep can therefore tell which runs of the killed sweep
are still going. It waits for them and runs nothing twice. Dense models are trained by jobs too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ...errors import SmartpruneError
from ...run_files import CONFIG, METRICS, RESULT
from ...training.check import check
from ...training.config import Config, load_config
from ...training.folder import write_json
from ...training.result import Result
from .dense import DenseModels
from .grid import Cell
from .history import add_to_history
from .job import POLL_SECONDS, Job, cpu_cores, try_lock, uses_gpu
from .progress import RunStatus, SweepProgress, SweepStatus
from .slots import Pace, Slots, gpu_memory, once_a_second, read_pace

STOP_SECONDS, STOP_SHARE = (
    15.0,
    0.1,
)  # of the time limit, kept for the checkpoints of the jobs that are stopped; the smaller of the two
OBSERVE_SECONDS = 1.0
LOGS, MODELS = "logs", "dense"  # folders in the folder of the sweep
# settings that may differ between the run in a folder and the requested run, because they do not change the result
IGNORED = ("out", "dense", "device", "amp", "threads", "compile", "graph", "checkpoint_seconds")
Kind = Literal["run", "dense"]


@dataclass(frozen=True)
class Failure:
    name: str
    code: int
    log: Path
    lines: list[str]


@dataclass
class Outcome:
    """The result of a sweep. ``reason`` says why cells are missing: "stopped", "time", or "" where none are missing."""

    done: list[Cell] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    missing: list[Cell] = field(default_factory=list)
    reason: str = ""


class Sweep:
    """Runs cells in their order. All state that survives a restart is in the folder ``out``."""

    def __init__(
        self,
        out: Path,
        cells: Sequence[Cell],
        jobs: int | None = None,
        minutes: float | None = None,
        parts: Path | None = None,
        slots: Slots | None = None,
    ) -> None:
        self.out, self.cells, self.minutes = out, list(cells), minutes
        self.slots = slots or make_slots(jobs, cells)
        self.dense_models = DenseModels(out / MODELS, parts)
        self.durations: dict[tuple[Kind, str], list[float]] = {}  # seconds of finished jobs, by kind and length
        self.running: dict[str, Job] = {}
        self.launch: Callable[[str, str, Path, Path, list[str], int], Any] = Job  # starts a process on this machine
        self._kinds: dict[str, str] = {}  # of the jobs that were started
        self._lengths: dict[str, str] = {}
        self._next_look = 0.0
        self.failed: dict[str, Failure] = {}
        for cell in cells:
            self._require_same_settings(cell)

    def check(self) -> None:
        """Raises errors that would otherwise make a run fail after its dense stage.

        Cells that differ only in their seeds are checked once. Runs that have begun were checked when they began.
        """
        checked: list[Config] = []
        for cell in self.cells:
            if self.done(cell) or (cell.folder(self.out) / CONFIG).exists():
                continue
            config = replace(cell.config, seed=0, out=str(self.out))
            if config not in checked:
                checked.append(config)
                check(config)

    def run(self, progress: SweepProgress, stop: Callable[[], bool], command: str = "") -> Outcome:
        """Runs the cells until all are done, the time is up, or ``stop()`` is true."""
        self._prepare(command)
        end = None
        if self.minutes is not None:
            seconds = 60 * self.minutes
            end = time.monotonic() + seconds - min(STOP_SECONDS, STOP_SHARE * seconds)
        self._read_durations(progress)
        reason, out_of_time = "", False
        try:
            while True:
                self.collect_finished(progress)
                if not reason and stop():
                    reason = "stopped"
                elif not reason and end is not None and time.monotonic() >= end:
                    reason = "time"
                if reason:
                    for job in self.running.values():
                        job.stop()
                else:
                    self._observe(progress)
                    out_of_time = not self._start_jobs(end)
                if not self.running and (reason or out_of_time or next(self._waiting(), None) is None):
                    break
                progress.show(self._status())
                time.sleep(POLL_SECONDS)
        except BaseException:
            for job in self.running.values():
                job.stop()
            for job in self.running.values():
                job.end()
            raise
        return self._outcome(reason or ("time" if out_of_time else ""))

    def done(self, cell: Cell) -> bool:
        return (cell.folder(self.out) / RESULT).exists()

    def seconds_spent(self, kind: Kind, cell: Cell) -> float:
        """Seconds that an interrupted run has been trained for."""
        folder = self.dense_models.run_folder(cell.dense or "") if kind == "dense" else cell.folder(self.out)
        try:
            return float(json.loads((folder / METRICS).read_text().splitlines()[-1])["seconds"])
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return 0.0

    def _outcome(self, reason: str) -> Outcome:
        done = [cell for cell in self.cells if self.done(cell) and cell.name not in self.failed]
        missing = [cell for cell in self.cells if cell not in done and cell.name not in self.failed]
        return Outcome(done, list(self.failed.values()), missing, reason if missing else "")

    def _prepare(self, command: str) -> None:
        try:
            for folder in (self.out, self.out / LOGS, self.out / MODELS):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SmartpruneError(f"{self.out}: the sweep's folder cannot be made ({error.strerror or error})") from None
        add_to_history(self.out, command)
        for name, cell in {cell.dense: cell for cell in self.cells if cell.dense is not None}.items():
            if self.dense_models.collect(name) and self.dense_models.run_folder(name).exists():
                self._end_dense_run(name, cell)

    def _read_durations(self, progress: SweepProgress) -> None:
        for cell in filter(self.done, self.cells):
            try:
                seconds = Result.load(cell.folder(self.out)).seconds
                self.durations.setdefault(("run", length_of("run", cell)), []).append(seconds)
            except SmartpruneError as error:
                self._fail_unreadable(cell.name, cell.folder(self.out), error)
        if skipped := sum(map(len, self.durations.values())):
            progress.message(f"{skipped} of {len(self.cells)} runs are done already")

    def _require_same_settings(self, cell: Cell) -> None:
        """Raises if the folder of a cell holds a run with other settings."""
        path = cell.folder(self.out) / CONFIG
        if not path.exists():
            return
        try:
            stored = asdict(load_config(path))
        except SmartpruneError:
            return  # the process of the run reports what is wrong
        for name, value in asdict(cell.config).items():
            if name not in IGNORED and stored[name] != value:
                raise SmartpruneError(
                    f"{path} was made with {name}={stored[name]!r}, but {value!r} is requested now; choose another --out"
                )
        if cell.dense is not None and stored["dense"] is not None:
            # compare network and seed; the hash at the end also covers settings that were compared above
            used, requested = (name.rpartition("-")[0] for name in (Path(stored["dense"]).stem, cell.dense))
            if used != requested:
                raise SmartpruneError(
                    f"{path} started from the dense model {used}, but {requested} is requested now; choose another --out"
                )

    # starting jobs

    def _waiting(self) -> Iterator[tuple[Kind, Cell]]:
        """The missing cells that can be run, or that need a dense model to be trained first, in their order."""
        dense = set(self.running)
        for cell in self.cells:
            if self.done(cell) or cell.name in self.running or cell.name in self.failed:
                continue
            if cell.dense is None or self.dense_models.path(cell.dense).exists():
                yield "run", cell
            elif cell.dense not in dense and cell.dense not in self.failed:
                dense.add(cell.dense)
                yield "dense", cell

    def _start_jobs(self, end: float | None) -> bool:
        """Starts jobs until all slots are in use. False if there are jobs left, and none would finish in time."""
        while True:
            waiting = list(self._waiting())
            job = next((job for job in waiting if self._ends_before(end, *job)), None)
            if job is None:
                return not waiting
            kind, cell = job
            if not self.slots.may_start(network_of(kind, cell), self._paces()):
                return True
            self.slots.started(network_of(kind, cell))
            self._start(kind, cell)

    def _ends_before(self, end: float | None, kind: Kind, cell: Cell) -> bool:
        """Whether a job would end in time. A job that is longer than the whole limit has to be resumed in any case."""
        known = self.durations.get((kind, length_of(kind, cell)))
        if end is None or not known:
            return True
        whole = statistics.median(known)
        is_longer = self.minutes is not None and whole > 60 * self.minutes
        return is_longer or time.monotonic() + whole - self.seconds_spent(kind, cell) <= end

    def _paces(self) -> dict[str, Pace]:
        return {name: read_pace(self._kinds[name], job.folder) for name, job in self.running.items()}

    def _observe(self, progress: SweepProgress) -> None:
        if time.monotonic() >= self._next_look:
            change = self.slots.observe(self._paces())
            if change:
                progress.message(change)
            self._next_look = time.monotonic() + OBSERVE_SECONDS

    def _start(self, kind: Kind, cell: Cell) -> None:
        name = cell.dense if kind == "dense" and cell.dense is not None else cell.name
        folder = self.dense_models.run_folder(name) if kind == "dense" else cell.folder(self.out)
        if (folder / CONFIG).exists():
            arguments = ["train", "--resume", "--out", str(folder)]
        else:
            config = cell.dense_config(folder) if kind == "dense" else cell.config
            settings = asdict(config) | {"out": ""}
            if kind == "run" and cell.dense is not None:
                settings["dense"] = str(self.dense_models.path(cell.dense).absolute())
            path = self.out / LOGS / f"{name}.json"
            write_json(path, settings)
            arguments = ["train", "--config", str(path), "--out", str(folder)]
        arguments += ["--model", cell.config.model]  # the run imports no other function, even if its folder names one
        arguments += ["--dense-only"] * (kind == "dense")
        self.running[name] = self.launch(name, kind, folder, self.out / LOGS / f"{name}.log", arguments, self.slots.most)
        self._kinds[name] = network_of(kind, cell)
        self._lengths[name] = length_of(kind, cell)

    def _end_dense_run(self, name: str, cell: Cell) -> None:
        """Cleans up after a killed sweep whose dense model is already trained: removes its run folder, or ends its process."""
        with (self.out / LOGS / f"{name}.log").open("ab") as log:
            ended = try_lock(log)
        if ended:
            self.dense_models.remove_run_folder(name)
        else:
            self._start("dense", cell)  # adopts the process, which is then stopped because its model is there

    # collecting finished jobs

    def collect_finished(self, progress: SweepProgress) -> None:
        """Handles the jobs that have ended."""
        for name, job in list(self.running.items()):
            if job.kind == "dense" and self.dense_models.collect(name):
                job.stop()  # only its dense model is needed
            code = job.poll()
            if code is None:
                continue
            del self.running[name]
            finished = self._finish_dense(progress, job) if job.kind == "dense" else self._finish_run(progress, job)
            if not finished and not job.stopped and not job.adopted:  # stopped and adopted jobs are resumed
                self._fail(progress, job, code)

    def _finish_dense(self, progress: SweepProgress, job: Job) -> bool:
        if not self.dense_models.collect(job.name):
            return False
        if not job.adopted:
            self._add_duration("dense", job.name, job.seconds)
        self.dense_models.remove_run_folder(job.name)
        self._report(progress, job, "trained")
        return True

    def _finish_run(self, progress: SweepProgress, job: Job) -> bool:
        if not (job.folder / RESULT).exists():
            return False
        try:
            result = Result.load(job.folder)
        except SmartpruneError as error:
            self._fail_unreadable(job.name, job.folder, error)
            self._report(progress, job, f"FAILED: its {RESULT} cannot be read")
            return True
        if not job.adopted:
            self._add_duration("run", job.name, max(job.seconds, result.seconds))
        self._report(progress, job, f"test {result.measure} {result.metrics_line('pruned')}")
        return True

    def _add_duration(self, kind: Kind, name: str, seconds: float) -> None:
        self.durations.setdefault((kind, self._lengths[name]), []).append(seconds)

    def _fail(self, progress: SweepProgress, job: Job, code: int) -> None:
        """Records a failure. If a dense model fails, so do the cells that need it."""
        self.failed[job.name] = Failure(job.name, code, job.log, job.last_lines())
        self._report(progress, job, f"FAILED with exit code {code}")
        if job.kind == "dense":
            for cell in self.cells:
                if cell.dense == job.name and not self.done(cell):
                    self.failed[cell.name] = Failure(cell.name, code, job.log, [f"its dense model {job.name} failed"])

    def _fail_unreadable(self, name: str, folder: Path, error: SmartpruneError) -> None:
        """Records the failure of a finished run whose result cannot be read."""
        self.failed[name] = Failure(name, 1, folder / RESULT, [str(error)])

    def _report(self, progress: SweepProgress, job: Job, event: str) -> None:
        done = sum(map(self.done, self.cells))
        progress.message(f"{done:>{len(str(len(self.cells)))}}/{len(self.cells)}  {job.name}  {event}  {job.seconds:.0f} s")

    def _status(self) -> SweepStatus:
        done = sum(map(self.done, self.cells))
        failed = sum(cell.name in self.failed for cell in self.cells)
        remaining = len(self.cells) - done - failed
        durations = [seconds for (kind, _), all_seconds in self.durations.items() if kind == "run" for seconds in all_seconds]
        seconds_left = statistics.median(durations) * remaining / self.slots.limit if durations else None
        running = [RunStatus(job.name, job.last_line(), job.seconds) for job in self.running.values()]
        return SweepStatus(done, len(self.cells), failed, seconds_left, running)


def make_slots(jobs: int | None, cells: Sequence[Cell]) -> Slots:
    """The given number of jobs, or one per CPU core. On a GPU, the number is found unless it is given."""
    if jobs is None and uses_gpu(cell.config.device for cell in cells):
        return Slots(cpu_cores(), fixed=False, read_memory=once_a_second(gpu_memory))
    return Slots(jobs or cpu_cores())


def network_of(kind: Kind, cell: Cell) -> str:
    """What the memory and the speed of a job depend on most."""
    return f"{kind} {cell.config.task} {cell.config.model}"


def length_of(kind: Kind, cell: Cell) -> str:
    """What the duration of a job depends on most. Dense models that are given or shared take no time in a run."""
    config = cell.config
    epochs = config.dense_epochs if kind == "dense" else config.search_epochs + config.finetune_epochs
    return f"{config.task} {config.model} {epochs} epochs of batch {config.batch}"
