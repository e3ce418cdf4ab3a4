"""Finished runs that several modules share. Tests must not change them."""

from pathlib import Path

import pytest

from helpers.training_jobs import ALL_OPTIONS, small_config
from smartprune.training.train import train


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(small_config(out))
    return out


@pytest.fixture(scope="session")
def run_with_all_options(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "all"
    train(small_config(out, **ALL_OPTIONS))
    return out
