"""Runs that several modules share. Tests must not change them."""

from pathlib import Path

import pytest

from helpers.training_jobs import SMALL_FLAGS, run_in_subprocess, small_config
from smartprune.training.train import train


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run, runs/a, and the output of its command."""
    folder = tmp_path_factory.mktemp("work")
    process = run_in_subprocess("train", *SMALL_FLAGS, "--out", "runs/a", folder=folder)
    assert process.returncode == 0, process.stderr
    (folder / "stdout.txt").write_text(process.stdout)
    (folder / "stderr.txt").write_text(process.stderr)
    return folder


@pytest.fixture
def in_work_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    train(small_config(out, dense_epochs=1, search_epochs=1))
    return out
