"""One process of a sweep: ``python -m smartprune train ...`` with a log that is locked as long as it lives."""

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

GRACE_SECONDS = 60.0  # from SIGTERM to SIGKILL; a run resumes after either
TAIL_LINES, TAIL_BYTES = 8, 8192
OWNER = "# process and its sweep:"


class Job:
    """Starts the process, or adopts the one that a killed sweep left behind with the same log."""

    def __init__(self, name: str, kind: str, folder: Path, log: Path, words: list[str], jobs: int) -> None:
        self.name, self.kind, self.folder, self.log = name, kind, folder, log
        self.began = time.monotonic()
        self.process: subprocess.Popen[bytes] | None = None
        self._asked: float | None = None
        self._left = False
        with log.open("ab") as file:
            if not locked(file):
                return
            command = [sys.executable, "-m", "smartprune", *words]
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            # the lock goes with the open file, so the process keeps it when this one is killed
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(jobs),
                start_new_session=True,
            )
            file.write(f"{OWNER} {self.process.pid} {os.getpid()}\n".encode())

    @property
    def adopted(self) -> bool:
        return self.process is None

    @property
    def stopped(self) -> bool:
        """Whether it was asked to stop."""
        return self._asked is not None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def poll(self) -> int | None:
        """The exit code once it has ended; 0 for an adopted one, whose code nobody was told."""
        if self.process is not None:
            if self._asked is not None and time.monotonic() - self._asked > GRACE_SECONDS:
                self.process.kill()
            return self.process.poll()
        with self.log.open("ab") as file:
            return 0 if self._left or locked(file) else None

    def stop(self) -> None:
        """Asks it to write a checkpoint and end. One whose sweep lives on is left to that."""
        if self._asked is not None:
            return
        self._asked = time.monotonic()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            return
        orphan = self._orphan()
        if orphan is None or self.poll() is not None:
            self._left = True
        else:
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGTERM)  # it holds the log's lock, so the number is still its own

    def _orphan(self) -> int | None:
        """The process that holds the log, if the sweep that started it is gone."""
        owners = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(OWNER)]
        try:
            process, sweep = map(int, owners[-1].removeprefix(OWNER).split())
        except (IndexError, ValueError):
            return None
        return None if alive(sweep) else process

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def last_lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(OWNER)][-TAIL_LINES:]

    def last_line(self) -> str:
        lines = self.last_lines()
        return "" if not lines or lines[-1].startswith("$ ") else lines[-1]


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def locked(file: IO[bytes]) -> bool:
    """Whether the file could be locked; the system drops the lock when the last process that has it open ends."""
    try:
        import fcntl
    except ImportError:  # a system without it
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def environment(jobs: int) -> dict[str, str]:
    """This package for the process, and its share of the cores."""
    source = str(Path(__file__).parents[3])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // jobs)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": threads}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def jobs_at_once(devices: Iterable[str]) -> int:
    """As many as there are cores; one where a GPU does the work, which several share only if asked to."""
    import torch

    wanted = set(devices)
    return 1 if "cuda" in wanted or ("auto" in wanted and torch.cuda.is_available()) else cores()
