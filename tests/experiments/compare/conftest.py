from __future__ import annotations

from pathlib import Path

import pytest

from helpers.finished_runs import write_grid_of_runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_grid_of_runs(tmp_path)
