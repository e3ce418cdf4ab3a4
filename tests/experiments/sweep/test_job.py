"""The processes of a sweep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartprune.experiments.sweep.job import default_jobs, job_environment


def test_jobs_share_the_cpu_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_jobs(["cuda"]) == 1
    assert default_jobs(["cpu"]) >= 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job_environment(1000)["OMP_NUM_THREADS"] == "1"


def test_jobs_import_the_package_from_its_parent_folder() -> None:
    """If the folder of the package itself were in the path, its modules could hide libraries of the same name."""
    first = Path(job_environment(1)["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "smartprune" / "__init__.py").is_file()
    assert not (first / "onnx.py").exists()
