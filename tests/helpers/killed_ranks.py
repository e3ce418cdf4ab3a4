"""Runs two ranks under ``torchrun --max-restarts`` and kills ranks at random moments. Needs /proc."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.training_jobs import environment

AT_START = 0.25  # the share of kills while the ranks start
TESTS = str(Path(__file__).parents[1])


@dataclass
class Job:
    """A command for every rank, a value that changes with every checkpoint, and environment variables."""

    words: Sequence[str]
    checkpoint: Callable[[], Any]
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    moments: random.Random = field(default_factory=lambda: random.Random(0))
    spacing: float = 0.0  # checkpoints between a restart and the next kill, on average
    longest: float = 0.3  # seconds between such a checkpoint, or the start of the ranks, and the kill

    def run(self, kills: int, seconds: float) -> list[str]:
        """Runs the job to its end. Returns when its ranks were killed: "start" or "training", in order.

        Raises AssertionError with the end of the log if the job fails or needs more time.
        """
        done: list[str] = []
        launcher, until = self._launch(), time.monotonic() + seconds
        try:
            old: set[int] = set()
            while launcher.poll() is None and len(done) < kills:
                old, moment = self._kill_one(launcher, old, until)
                done += [moment] if moment else []
            while launcher.poll() is None:
                self._wait(until)
        finally:
            _kill_group(launcher)
        assert launcher.returncode == 0, self._end_of_log()
        return done

    def _launch(self) -> subprocess.Popen[str]:
        env = environment() | {"PYTHONPATH": os.pathsep.join([TESTS, environment()["PYTHONPATH"]])} | self.variables
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000"]
        with self.log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, *torchrun, *self.words],
                env=env, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip

    def _kill_one(self, launcher: subprocess.Popen[str], old: set[int], until: float) -> tuple[set[int], str]:
        """Kills one rank. Returns the process ids of the ranks that were running, and the moment, or "" if the job ended first."""
        ranks: set[int] = set()
        while len(ranks) < 2 and launcher.poll() is None:
            ranks = set(_ranks(launcher.pid)) - old
            self._wait(until)
        moment = "start" if self.moments.random() < AT_START else "training"
        last, left = self.checkpoint(), 1 + self.moments.uniform(0, 2 * self.spacing)
        while moment == "training" and left > 0 and launcher.poll() is None:
            self._wait(until)
            if self.checkpoint() != last:
                last, left = self.checkpoint(), left - 1
        time.sleep(self.moments.uniform(0, self.longest))
        pid = self.moments.choice(sorted(ranks) or [0])
        if not pid or launcher.poll() is not None or not _is_running(pid):
            return ranks, ""
        os.kill(pid, signal.SIGKILL)
        return ranks, moment

    def _wait(self, until: float) -> None:
        assert time.monotonic() < until, f"the job needs too long: {self._end_of_log()}"
        time.sleep(0.01)

    def _end_of_log(self) -> str:
        return self.log.read_text()[-4000:]


def modified(path: Path) -> int:
    """When a file was last replaced, or 0."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _ranks(launcher: int) -> list[int]:
    """The process ids of the ranks that a launcher has started."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == launcher and state != "Z" and b"LOCAL_RANK=" in (path.parent / "environ").read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _kill_group(launcher: subprocess.Popen[str]) -> None:
    """Kills what is left of a job. torchrun starts every rank in the session of its launcher or in one of its own."""
    for pid in _ranks(launcher.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait()
