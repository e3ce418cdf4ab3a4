"""A grid of runs on one machine: a process each, several at once, resumable after any interruption.

Every job writes to a log that it holds locked as long as it lives. So a sweep that is started again knows which runs of
the killed one are still going, waits for them, and runs nothing twice. Dense models are jobs like the others.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...errors import SmartpruneError
from ...files import parse_json, read_limited, write_atomic
from ...run_files import CONFIG, DENSE, METRICS, RESULT
from ...training.config import Config, load
from ...training.folder import write_json
from ...training.train import Result, check
from ..compare.record import git_commit
from .board import Board, Line, State
from .grid import Cell
from .job import Job, jobs_at_once, locked

POLL_SECONDS = 0.1
NOTES, LOGS, MODELS = "sweep.json", "logs", "dense"
# settings that may differ between the run in a folder and the one asked for, with the same result
ASIDE = ("out", "dense", "device", "amp", "threads", "compile", "graph", "checkpoint_seconds")


@dataclass(frozen=True)
class Failure:
    name: str
    code: int
    log: Path
    lines: list[str]


@dataclass
class Outcome:
    """What became of the cells. ``why`` there are missing ones: "stopped", "time", or "" where none are."""

    done: list[Cell] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    missing: list[Cell] = field(default_factory=list)
    why: str = ""


class Sweep:
    """Cells in the order in which they are run; the folder ``out`` is all that it remembers."""

    def __init__(self, out: Path, cells: Sequence[Cell], jobs: int | None = None, minutes: float | None = None) -> None:
        self.out, self.cells, self.minutes = out, list(cells), minutes
        self.jobs = jobs or jobs_at_once(cell.config.device for cell in cells)
        self.took: dict[str, list[float]] = {"run": [], "dense": []}  # seconds of finished jobs
        self.running: dict[str, Job] = {}
        self.failed: dict[str, Failure] = {}
        for cell in cells:
            self._require_same(cell)

    def check(self) -> None:
        """Raises now what would make a run fail after the dense stage that it waits for. Seeds make no difference to that, and
        neither does a run that has begun: it was checked then."""
        seen: list[Config] = []
        for cell in self.cells:
            if self.done(cell) or (cell.folder(self.out) / CONFIG).exists():
                continue
            config = replace(cell.config, seed=0, out=str(self.out))
            if config not in seen:
                seen.append(config)
                check(config)

    def run(self, board: Board, stop: Callable[[], bool], command: str = "") -> Outcome:
        """Takes the cells to their end, or as far as time and signals allow."""
        self._prepare(command)
        until = None if self.minutes is None else time.monotonic() + 60 * self.minutes
        for cell in filter(self.done, self.cells):
            try:
                self.took["run"].append(Result.load(cell.folder(self.out)).seconds)
            except SmartpruneError as error:
                self._unreadable(cell.name, cell.folder(self.out), error)
        skipped = len(self.took["run"])
        if skipped:
            board.say(f"{skipped} of {len(self.cells)} runs are done already")
        why, late = "", False
        try:
            while True:
                self._reap(board)
                if not why and stop():
                    why = "stopped"
                elif not why and until is not None and time.monotonic() >= until:
                    why = "time"
                if why:
                    for job in self.running.values():
                        job.stop()
                elif not late:
                    late = not self._start_next(until)
                if not self.running and (why or late or self._next() is None):
                    break
                board.show(self._state())
                time.sleep(POLL_SECONDS)
        except BaseException:
            for job in self.running.values():
                job.kill()
            raise
        return self._outcome(why or ("time" if late else ""))

    def _outcome(self, why: str) -> Outcome:
        done = [cell for cell in self.cells if self.done(cell) and cell.name not in self.failed]
        missing = [cell for cell in self.cells if cell not in done and cell.name not in self.failed]
        return Outcome(done, list(self.failed.values()), missing, why if missing else "")

    def _prepare(self, command: str) -> None:
        try:
            for folder in (self.out, self.out / LOGS, self.out / MODELS):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SmartpruneError(f"{self.out}: the sweep's folder cannot be made ({error.strerror or error})") from None
        told = noted(self.out)
        for name, value in (("commands", command), ("sources", git_commit())):
            if value and value not in told[name]:
                told[name].append(value)
        write_atomic(self.out / NOTES, (json.dumps(told, indent=1) + "\n").encode())
        for name, cell in {cell.dense: cell for cell in self.cells if cell.dense is not None}.items():
            if self._harvest(name) and self._dense_work(name).exists():
                self._let_go(name, cell)

    def done(self, cell: Cell) -> bool:
        return (cell.folder(self.out) / RESULT).exists()

    def _require_same(self, cell: Cell) -> None:
        """A folder that already holds another run than the one asked for is an error, not something to skip."""
        path = cell.folder(self.out) / CONFIG
        if not path.exists():
            return
        try:
            stored = asdict(load(path))
        except SmartpruneError:
            return  # its process will say what is wrong with it
        for name, value in asdict(cell.config).items():
            if name not in ASIDE and stored[name] != value:
                raise SmartpruneError(
                    f"{path} was made with {name}={stored[name]!r}, and {value!r} is asked for now; choose another --out"
                )
        if cell.dense is not None and stored["dense"] is not None:
            # by network and seed: what else it depends on is compared above
            began, wanted = (name.rpartition("-")[0] for name in (Path(stored["dense"]).stem, cell.dense))
            if began != wanted:
                raise SmartpruneError(
                    f"{path} began with the dense model {began}, and {wanted} is asked for now; choose another --out"
                )

    # which job is next

    def _next(self) -> tuple[str, Cell] | None:
        """The first cell that is missing and can be run, or the dense model that it waits for."""
        for cell in self.cells:
            if self.done(cell) or cell.name in self.running or cell.name in self.failed:
                continue
            if cell.dense is None or self.dense_path(cell.dense).exists():
                return "run", cell
            if cell.dense not in self.running and cell.dense not in self.failed:
                return "dense", cell
        return None

    def _start_next(self, until: float | None) -> bool:
        """Fills the free places. False if there is no time left for the next job."""
        while len(self.running) < self.jobs:
            found = self._next()
            if found is None:
                return True
            kind, cell = found
            if until is not None and self.took[kind]:
                left = statistics.median(self.took[kind]) - self._spent(kind, cell)
                if time.monotonic() + left > until:
                    return False
            self._start(kind, cell)
        return True

    def _spent(self, kind: str, cell: Cell) -> float:
        """Seconds that an interrupted run has behind it."""
        path = (self._dense_work(cell.dense or "") if kind == "dense" else cell.folder(self.out)) / METRICS
        try:
            return float(json.loads(path.read_text().splitlines()[-1])["seconds"])
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return 0.0

    def _start(self, kind: str, cell: Cell) -> None:
        name = cell.dense if kind == "dense" and cell.dense is not None else cell.name
        folder = self._dense_work(name) if kind == "dense" else cell.folder(self.out)
        if (folder / CONFIG).exists():
            words = ["train", "--resume", "--out", str(folder)]
        else:
            config = cell.dense_config(folder) if kind == "dense" else cell.config
            told = asdict(config) | {"out": ""}
            if kind == "run" and cell.dense is not None:
                told["dense"] = str(self.dense_path(cell.dense).absolute())
            settings = self.out / LOGS / f"{name}.json"
            write_json(settings, told)
            words = ["train", "--config", str(settings), "--out", str(folder)]
        self.running[name] = Job(name, kind, folder, self.out / LOGS / f"{name}.log", words, self.jobs)

    # what has ended

    def _reap(self, board: Board) -> None:
        for name, job in list(self.running.items()):
            if job.kind == "dense" and self._harvest(name):
                job.stop()  # all that was wanted of it
            code = job.poll()
            if code is None:
                continue
            del self.running[name]
            if job.kind == "dense":
                if self._harvest(name):
                    if not job.adopted:
                        self.took["dense"].append(job.seconds)
                    shutil.rmtree(self._dense_work(name), ignore_errors=True)
                    self._report(board, job, "trained")
                    continue
            elif (job.folder / RESULT).exists():
                try:
                    result = Result.load(job.folder)
                except SmartpruneError as error:
                    self._unreadable(name, job.folder, error)
                    self._report(board, job, f"FAILED: its {RESULT} cannot be read")
                    continue
                if not job.adopted:
                    self.took["run"].append(max(job.seconds, result.seconds))
                self._report(board, job, f"{result.measure} {result.shown('pruned')}")
                continue
            if job.stopped or job.adopted:
                continue  # to be resumed, now or by the next sweep
            failure = Failure(name, code, job.log, job.last_lines())
            self.failed[name] = failure
            self._report(board, job, f"FAILED with exit code {code}")
            if job.kind == "dense":
                for cell in self.cells:
                    if cell.dense == name and not self.done(cell):
                        self.failed[cell.name] = Failure(cell.name, code, job.log, [f"its dense model {name} failed"])

    def _unreadable(self, name: str, folder: Path, error: SmartpruneError) -> None:
        """Notes a run that is done and whose result cannot be read."""
        self.failed[name] = Failure(name, 1, folder / RESULT, [str(error)])

    def _report(self, board: Board, job: Job, what: str) -> None:
        done = sum(map(self.done, self.cells))
        board.ended(f"{done:>{len(str(len(self.cells)))}}/{len(self.cells)}  {job.name}  {what}  {job.seconds:.0f} s")

    def _state(self) -> State:
        done = sum(map(self.done, self.cells))
        failed = sum(cell.name in self.failed for cell in self.cells)
        left = len(self.cells) - done - failed
        known = self.took["run"]
        rest = statistics.median(known) * left / self.jobs if known else None
        lines = [Line(job.name, job.last_line(), job.seconds) for job in self.running.values()]
        return State(done, len(self.cells), failed, rest, lines)

    # dense models: trained in a hidden run folder, then kept as one file

    def dense_path(self, name: str) -> Path:
        return self.out / MODELS / f"{name}.safetensors"

    def _dense_work(self, name: str) -> Path:
        return self.out / MODELS / f".{name}"

    def _let_go(self, name: str, cell: Cell) -> None:
        """Of a dense model that is there, what a killed sweep left behind: its run folder, and perhaps its process."""
        with (self.out / LOGS / f"{name}.log").open("ab") as log:
            ended = locked(log)
        if ended:
            shutil.rmtree(self._dense_work(name), ignore_errors=True)
        else:
            self._start("dense", cell)  # adopts it, and then it is stopped as one that has done all that was wanted of it

    def _harvest(self, name: str) -> bool:
        """Takes the dense model out of its run, which writes it whole at the end of the dense stage."""
        path, made = self.dense_path(name), self._dense_work(name) / DENSE
        if not path.exists() and made.exists():
            write_atomic(path, made.read_bytes())
        return path.exists()


def noted(out: Path) -> dict[str, list[str]]:
    """The commands by which the runs in a sweep's folder were made, and the commits of the source that made them."""
    path = out / NOTES
    data = parse_json(read_limited(path, 1 << 20), str(path)) if path.exists() else {}
    told: dict[str, list[str]] = {"commands": [], "sources": []}
    for name, kept in told.items():
        found = data.get(name) if isinstance(data, dict) else None
        kept += [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    return told
