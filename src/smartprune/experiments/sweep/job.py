"""One training process of a sweep: ``python -m smartprune train ...``, with a log that stays locked while the process runs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE_SECONDS = 60.0  # after which a process that was asked to end gets a second SIGTERM, which ends it without a checkpoint
POLL_SECONDS = 0.1
TAIL_LINES, TAIL_BYTES = 8, 8192
KERNELS = "kernels"  # a folder beside the logs
KERNEL_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
OWNER = "# process and its sweep:"


class Job:
    """Starts a process, or adopts the process that a killed sweep left behind with the same log."""

    def __init__(self, name: str, kind: str, folder: Path, log: Path, arguments: list[str], jobs: int) -> None:
        self.name, self.kind, self.folder, self.log = name, kind, folder, log
        self.process: subprocess.Popen[bytes] | None = None
        self._start = time.monotonic()
        self._stop_time: float | None = None
        self._abandoned = False
        with log.open("ab") as file:
            if not try_lock(file):
                return
            command = [sys.executable, "-m", "smartprune", *arguments]
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            # the child inherits the open file and with it the lock, so the lock outlives this process
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=job_environment(jobs, log.parent.parent / KERNELS),
                start_new_session=True,
            )
            file.write(f"{OWNER} {self.process.pid} {os.getpid()}\n".encode())

    @property
    def adopted(self) -> bool:
        return self.process is None

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stop_time is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def poll(self) -> int | None:
        """The exit code once the process has ended; 0 for an adopted process, whose exit code is unknown."""
        if self.process is not None:
            if self._stop_time is not None and time.monotonic() - self._stop_time > GRACE_SECONDS:
                self.process.terminate()  # not SIGKILL, which would end all processes that share a GPU under MPS
                self._stop_time = time.monotonic()
            return self.process.poll()
        with self.log.open("ab") as file:
            return 0 if self._abandoned or try_lock(file) else None

    def stop(self) -> None:
        """Asks the process to write a checkpoint and end. A process of another sweep that still runs is left alone."""
        if self._stop_time is not None:
            return
        self._stop_time = time.monotonic()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            return
        orphan = self._find_orphan()
        if orphan is None or self.poll() is not None:
            self._abandoned = True
        else:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGTERM)  # it holds the lock of the log, so the process id still belongs to it

    def _find_orphan(self) -> int | None:
        """The process that writes the log, if the sweep that started it is gone."""
        owners = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(OWNER)]
        try:
            process, sweep = map(int, owners[-1].removeprefix(OWNER).split())
        except (IndexError, ValueError):
            return None
        return None if is_running(sweep) else process

    def end(self) -> None:
        """Stops the process and waits until it has ended."""
        self.stop()
        while self.process is not None and self.poll() is None:
            time.sleep(POLL_SECONDS)

    def last_lines(self) -> list[str]:
        """The end of the log."""
        return last_lines(self.log)

    def last_line(self) -> str:
        """The last line of the log; empty as long as it holds only the command."""
        lines = self.last_lines()
        return "" if not lines or lines[-1].startswith("$ ") else lines[-1]


def last_lines(log: Path) -> list[str]:
    """The end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip() and not line.startswith(OWNER)][-TAIL_LINES:]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def try_lock(file: IO[bytes]) -> bool:
    """Locks a file; False if another process holds the lock. The lock ends with the last process that has the file open."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def job_environment(jobs: int, kernels: Path) -> dict[str, str]:
    """The environment of a job: the path of this package, its share of the CPU cores, and where compiled kernels are kept.

    Jobs of a sweep share their kernels, so that only the first job of a kind compiles them. Variables of the user come first.
    """
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // jobs)))
    caches = {name: os.environ.get(name, str(kernels.absolute() / folder)) for name, folder in KERNEL_CACHES.items()}
    return {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": threads}


def cpu_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def uses_gpu(devices: Iterable[str]) -> bool:
    """Whether jobs with these settings run on a GPU."""
    import torch

    names = set(devices)
    return "cuda" in names or ("auto" in names and torch.cuda.is_available())
