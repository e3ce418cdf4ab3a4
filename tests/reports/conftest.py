from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training_jobs import small_config
from smartprune.training.train import train


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run. Tests do not change it."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("report") / "run"
    train(small_config(folder, search_epochs=4))
    return folder
