"""stdout and stderr that are closed, full, redirected, limited to ASCII or without a reader."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.training_jobs import SMALL_FLAGS, command, environment
from smartprune.cli.streams import discard_unwritten, print_message
from smartprune.training.progress import Progress, Tick

FULL = Path("/dev/full")
QUICK = ["--dense-epochs", "1", "--search-epochs", "1", "--finetune-epochs", "1"]


def call(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), env=environment() | streams.pop("env", {}), timeout=120, check=False, **streams)


def close_streams(*handles: int) -> Callable[[], None]:
    """A ``preexec_fn`` that closes streams, like ``>&-`` in a shell."""

    def close() -> None:
        for handle in handles:
            os.close(handle)

    return close


class FailingStream:
    """A stream that fails after a number of writes."""

    encoding = "utf-8"

    def __init__(self, remaining: int, error: Exception) -> None:
        self.remaining, self.error, self.writes = remaining, error, 0

    def write(self, text: str) -> None:
        self.writes += 1
        self.remaining -= 1
        if self.remaining < 0:
            raise self.error

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_closed_pipe_prints_no_error(work: Path) -> None:
    process = subprocess.Popen(
        command("plan", "resnet8"),
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("plan", "resnet8"), ("report", "runs/a", "--json")])
def test_full_disk_prints_one_line(arguments: tuple[str, ...], work: Path) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(command(*arguments), cwd=work, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 1
    assert process.stderr.startswith("smartprune: ")
    assert "cannot be written or read (No space left on device)" in process.stderr
    assert process.stderr.count("\n") == 1


def test_dev_stdout_appends_to_the_redirected_file(finished_run: Path, tmp_path: Path) -> None:
    """The table and the CSV are appended to the file that stdout is redirected to."""
    log = tmp_path / "notes.log"
    log.write_text("before\n")
    before = log.stat().st_ino
    with log.open("a") as file:
        assert call("compare", str(finished_run), "--csv", "/dev/stdout", stdout=file, stderr=subprocess.PIPE).returncode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("digits(width=4)")
    assert lines[-2].startswith("folder,data,model")
    assert log.stat().st_ino == before


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.ENOSPC, "full"), ValueError("closed")])
def test_progress_is_silent_after_a_write_error(error: Exception, tmp_path: Path) -> None:
    stream = FailingStream(1, error)
    progress = Progress(stream)  # type: ignore[arg-type]
    tick = Tick("dense", 1, 1, 1, 1, 0.5, "accuracy", None, None, None, 1.0)
    for _ in range(4):
        progress(tick)
    progress.message("ignored")
    progress.close()
    assert stream.writes == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_run_finishes_if_stderr_is_full(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        process = call("train", *SMALL_FLAGS, *QUICK, "--out", str(tmp_path / "a"), stdout=subprocess.PIPE, stderr=full)
    assert process.returncode == 0
    assert b"verified yes" in process.stdout


def test_closed_streams_do_not_fail_a_command(finished_run: Path, tmp_path: Path) -> None:
    arguments = ["compare", str(finished_run), "--csv", "/dev/stdout"]
    process = call(*arguments, stderr=subprocess.PIPE, preexec_fn=close_streams(1))
    assert (process.returncode, process.stderr) == (0, b"written to /dev/stdout\n")
    out = tmp_path / "a"
    process = call("train", *SMALL_FLAGS, *QUICK, "--out", str(out), preexec_fn=close_streams(1, 2))
    assert process.returncode == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in finished_run.iterdir())


def test_ascii_streams_get_escaped_characters(finished_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Größe"
    shutil.copytree(finished_run, folder)
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    process = call("train", "--resume", "--out", str(folder), env=ascii_only, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert rb"Gr\xf6\xdfe" in process.stdout


def test_messages_to_a_failing_stderr_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FailingStream(0, OSError(errno.EPIPE, "gone")))
    print_message("nothing")
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    discard_unwritten(closed)
