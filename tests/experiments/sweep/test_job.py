"""The processes of a sweep."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from smartprune.experiments.sweep import job as job_module
from smartprune.experiments.sweep.job import Job, job_environment, uses_gpu


def test_jobs_share_the_cpu_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert uses_gpu(["cpu", "cuda"])
    assert not uses_gpu(["cpu"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job_environment(1000, tmp_path)["OMP_NUM_THREADS"] == "1"


def test_jobs_share_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in job_module.KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    environment = job_environment(1, tmp_path)
    assert environment["TRITON_CACHE_DIR"] == "mine"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


def test_jobs_import_the_package_from_its_parent_folder(tmp_path: Path) -> None:
    """If the folder of the package itself were in the path, its modules could hide libraries of the same name."""
    first = Path(job_environment(1, tmp_path)["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "smartprune" / "__init__.py").is_file()
    assert not (first / "onnx.py").exists()


@pytest.mark.skipif(os.name != "posix", reason="the program is a shell script")
def test_a_job_that_does_not_end_gets_sigterm_again_and_never_sigkill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under MPS, a process that SIGKILL ends takes all others with it."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ntrap 'trap - TERM' TERM\necho ready\nwhile :; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(job_module, "GRACE_SECONDS", 0.3)
    (tmp_path / "logs").mkdir()
    job = Job("a", "run", tmp_path / "a", tmp_path / "logs" / "a.log", [], 1)
    while job.last_line() != "ready":
        assert job.poll() is None
        time.sleep(0.02)
    job.end()
    assert job.poll() == -signal.SIGTERM
