"""A sweep on a Ray cluster: every job is a Ray task that runs ``python -m smartprune train ...`` in a worker process of its own.

The scheduler, the run folders and the logs are those of a sweep on one machine. Ray finds a machine with free CPUs and GPUs for
every job, and starts a job again if its worker is lost. The job then resumes from its last checkpoint. The folder of the sweep
must be on a disk that all machines of the cluster share. Ray is imported only here.
"""

from __future__ import annotations

import logging
import os
import runpy
import secrets
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import IO, Any

from ...errors import SmartpruneError
from ...run_files import CONFIG, DENSE, RESULT
from .job import GRACE_SECONDS, POLL_SECONDS, cpu_cores, last_lines, try_lock
from .slots import Slots
from .sweep import LOGS, Sweep

RETRIES = 5  # of a job whose worker is lost
LOCK_SECONDS = 0.5  # between attempts to lock a log
SHARED_DISK_SECONDS = 60.0  # until a file that another machine wrote is visible here
OBJECT_STORE_BYTES = 80 << 20  # the jobs return numbers; about the least that Ray allows
FORWARDED, PREFIX = ("PYTHONPATH", "OMP_NUM_THREADS"), "SMARTPRUNE_"  # environment variables that the jobs get from the sweep
WAITING = "waiting for a worker"


@contextmanager
def on_ray(sweep: Sweep, jobs: int | None = None, cpus: int = 1, gpus: float | None = None) -> Iterator[None]:
    """Makes the jobs of a sweep Ray tasks, as long as the context is open.

    Args:
        sweep: The sweep. Its folder must be an absolute path.
        jobs: The jobs that are submitted at once. The default is as many as the cluster can run now.
        cpus: The CPUs that each job requests. They are also its number of threads, unless ``OMP_NUM_THREADS`` is set.
        gpus: The GPUs that each job requests, at most 1. The default is 1 if the jobs use a GPU and the cluster has one.
    """
    ray = _import_ray()
    connected_before = ray.is_initialized()
    if not connected_before:
        _connect(ray)
    try:
        if gpus is None:
            devices = {cell.config.device for cell in sweep.cells}
            gpus = 1 if "cuda" in devices or ("auto" in devices and ray.cluster_resources().get("GPU", 0) >= 1) else 0
        slots = _slots(ray, cpus, gpus)
        if not slots and jobs is None:
            raise SmartpruneError(
                f"--on ray: no machine of the cluster has {cpus} CPUs and {gpus:g} GPUs for a run; the cluster has "
                f"{_describe(ray)}. Choose smaller --cpus or --gpus, or give --jobs to wait until there is such a machine"
            )
        with _shared_file(sweep.out / LOGS) as shared:
            sweep.slots = Slots(jobs or slots)
            sweep.launch = partial(RayJob, ray=ray, options=_options(cpus, gpus), shared=shared)
            yield
    finally:
        if not connected_before:
            ray.shutdown()


class RayJob:
    """One job, with the methods of :class:`smartprune.experiments.sweep.job.Job`."""

    adopted = False

    def __init__(
        self,
        name: str,
        kind: str,
        folder: Path,
        log: Path,
        arguments: list[str],
        jobs: int,
        *,
        ray: Any,
        options: dict[str, Any],
        shared: tuple[Path, str],
    ) -> None:
        self.name, self.kind, self.folder, self.log = name, kind, folder, log
        self._ray = ray
        self._log_bytes = log.stat().st_size if log.exists() else 0
        self._start: float | None = None
        self._end: float | None = None
        self._stop_time: float | None = None
        self._code: int | None = None
        self._problem: list[str] = []
        self._task = ray.remote(**options)(run_job).remote(arguments, folder, log, shared, Path.cwd())

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop_time is not None

    @property
    def seconds(self) -> float:
        """Since a worker began with the job."""
        return 0.0 if self._start is None else (self._end or time.monotonic()) - self._start

    def poll(self) -> int | None:
        """The exit code once the task has ended; 1 if its worker was lost too often."""
        if self._start is None and self.log.exists() and self.log.stat().st_size > self._log_bytes:
            self._start = time.monotonic()
        if self._code is None:
            if self._stop_time is not None and time.monotonic() - self._stop_time > GRACE_SECONDS:
                self._ray.cancel(self._task, force=True)
            if not self._ray.wait([self._task], timeout=0)[0]:
                return None
            self._code, self._end = self._read_code(), time.monotonic()
        output = self.folder / (DENSE if self.kind == "dense" else RESULT)
        if self._code == 0 and self._end is not None and not output.exists():
            return None if time.monotonic() - self._end < SHARED_DISK_SECONDS else 0
        return self._code

    def stop(self) -> None:
        """Asks the job to write a checkpoint and end. A job that has no worker yet is withdrawn."""
        if self._stop_time is None:
            self._stop_time = time.monotonic()
            self._ray.cancel(self._task)  # arrives as the SIGINT of Ctrl-C

    def end(self) -> None:
        """Stops the job and waits until it has ended."""
        self.stop()
        while self.poll() is None:
            time.sleep(POLL_SECONDS)

    def last_lines(self) -> list[str]:
        """The end of the log, and why there is no exit code."""
        return [*(last_lines(self.log) if self.log.exists() else []), *self._problem]

    def last_line(self) -> str:
        """The last line of the log; empty as long as it holds only the command."""
        if self._start is None:
            return WAITING
        lines = self.last_lines()
        return "" if not lines or lines[-1].startswith("$ ") else lines[-1]

    def _read_code(self) -> int:
        try:
            return int(self._ray.get(self._task))
        except self._ray.exceptions.TaskCancelledError:
            self._problem = ["stopped"]
        except self._ray.exceptions.RayTaskError as error:  # an exception in run_job
            self._problem = [str(error.cause if isinstance(error.cause, SmartpruneError) else error)]
        except self._ray.exceptions.RayError as error:
            first = str(error).strip().partition("\n")[0]
            self._problem = [f"Ray gave up after {RETRIES} retries: {type(error).__name__}: {first}"]
        return 1


def run_job(arguments: list[str], folder: Path, log: Path, shared: tuple[Path, str], directory: Path) -> int:
    """Runs a job in the process of a Ray worker, and returns its exit code. The log stays locked while the job runs.

    If the folder holds the run already, because an earlier worker was lost, the run is resumed.
    """
    path, token = shared
    if not path.exists() or path.read_text() != token:
        raise SmartpruneError(
            f"{log.parent} on {socket.gethostname()} is not the folder of this sweep: all machines of the Ray cluster must share "
            "the folder of --out, under the same path. Choose another --out, such as a folder on NFS"
        )
    if directory.is_dir():
        os.chdir(directory)  # settings may hold relative paths
    with log.open("ab") as file:
        while not try_lock(file):  # an earlier process of the job that is about to end
            time.sleep(LOCK_SECONDS)
        if (folder / CONFIG).exists():
            arguments = to_resume(arguments)
        file.write(f"$ {shlex.join(['smartprune', *arguments])}\n# on {socket.gethostname()}, process {os.getpid()}\n".encode())
        file.flush()
        with _output_to(file):
            return _run_module(arguments)


def to_resume(arguments: Sequence[str]) -> list[str]:
    """The arguments that resume what other arguments started.

    >>> to_resume(["train", "--config", "a.json", "--out", "runs/a"])
    ['train', '--resume', '--out', 'runs/a']
    """
    if "--config" not in arguments:
        return list(arguments)
    place = arguments.index("--config")
    return [*arguments[:place], "--resume", *arguments[place + 2 :]]


def _run_module(arguments: list[str]) -> int:
    """``python -m smartprune ...`` in this process, which then ends with its worker, however that happens."""
    sys.argv = ["smartprune", *arguments]
    try:
        runpy.run_module("smartprune", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def _output_to(file: IO[bytes]) -> Iterator[None]:
    """Writes what this process and its children print to a file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [(number, os.dup(number)) for number in (1, 2)]
    for number, _ in saved:
        os.dup2(file.fileno(), number)
    try:
        with open(os.dup(file.fileno()), "w", buffering=1) as text, redirect_stdout(text), redirect_stderr(text):
            yield
    finally:
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise SmartpruneError(
            f"--on ray: Ray cannot be imported ({error}); install it with: pip install ray, or leave --on out to run here"
        ) from None
    return ray


def _connect(ray: Any) -> None:
    """Connects to the cluster at RAY_ADDRESS or on this machine, or starts Ray on this machine alone."""
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    address = os.environ.get("RAY_ADDRESS")
    try:
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            if address:
                raise
            ray.init(num_cpus=cpu_cores(), include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
    except Exception as error:  # Ray raises many types, Exception itself included
        where = f"the cluster at RAY_ADDRESS={address} cannot be reached" if address else "Ray cannot be started"
        raise SmartpruneError(f"--on ray: {where} ({error}); check it with: ray status") from None


def _options(cpus: int, gpus: float) -> dict[str, Any]:
    """The options of the tasks. A worker ends after its job, so that no job sees the memory or the threads of another one."""
    threads = {"OMP_NUM_THREADS": str(cpus)}
    variables = {name: value for name, value in os.environ.items() if name in FORWARDED or name.startswith(PREFIX)}
    requests = {"num_cpus": cpus, "num_gpus": gpus}
    return {**requests, "max_retries": RETRIES, "max_calls": 1, "runtime_env": {"env_vars": {**threads, **variables}}}


def _slots(ray: Any, cpus: int, gpus: float) -> int:
    """How many jobs the cluster can run at once. A job needs its CPUs and GPUs on one machine."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    requests = [(name, number) for name, number in (("CPU", cpus), ("GPU", gpus)) if number]
    return sum(min(int(machine.get(name, 0) / number) for name, number in requests) for machine in machines)


def _describe(ray: Any) -> str:
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return "; ".join(f"a machine with {found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs" for found in machines)


@contextmanager
def _shared_file(folder: Path) -> Iterator[tuple[Path, str]]:
    """A file that the workers must find. It shows that they see the same folder."""
    token = secrets.token_hex(8)
    path = folder / f".ray-{token}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(token)
    except OSError as error:
        raise SmartpruneError(f"{folder}: the sweep's folder cannot be made ({error.strerror or error})") from None
    try:
        yield path, token
    finally:
        path.unlink(missing_ok=True)
