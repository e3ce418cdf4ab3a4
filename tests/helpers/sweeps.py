"""Small grids, and folders as a sweep leaves them."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smartprune.experiments.sweep.grid import Cell, Grid

from .training_jobs import SMALL_FLAGS, SMALL_SETTINGS, run_cli

OPTIONS = {name: value for name, value in SMALL_SETTINGS.items() if name != "sparsity"}
CELL = "digits-resnet8-{}-4x2-{}-s{}"  # the name of a cell: method, sparsity, seed


def small_grid(**changes: Any) -> Grid:
    values: dict[str, Any] = {"methods": ("smart", "magnitude"), "sparsities": (0.5,), "options": OPTIONS, "settings": {}}
    return Grid(**{**values, **changes})


def sweep_arguments(out: Path, *more: str) -> list[str]:
    """The arguments of a sweep over the cells of :func:`small_grid`."""
    flags = SMALL_FLAGS[: SMALL_FLAGS.index("--sparsity")]
    return ["sweep", *flags, "--methods", "smart,magnitude", "--sparsities", "0.5", "--out", str(out), *more]


def finish(out: Path, cell: Cell, pruned: float = 1.0, **config: Any) -> None:
    """Writes a run folder as a finished run leaves it. ``config`` are settings that the machine decided."""
    folder = cell.folder(out)
    folder.mkdir(parents=True)
    result = {"measure": "accuracy", "dense": 1.0, "pruned": pruned, "verified": True}
    result |= {"seconds": 100.0, "stage_seconds": {}, "also": {}, "files": {}}
    result |= {"folder": "", "task": "digits", "model": "resnet8", "method": cell.config.method, "versions": {"torch": "2"}}
    result |= {"samples": 297, "finished": "2026-01-01 12:00", "command": "smartprune train digits"}
    (folder / "config.json").write_text(json.dumps(asdict(cell.config) | config))
    (folder / "result.json").write_text(json.dumps(result))


def write_record(folder: Path, runs: Path) -> Path:
    """Writes a record of finished runs, without output."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert run_cli("compare", runs, "--record", folder, "--note", "made up") == 0
    return folder
