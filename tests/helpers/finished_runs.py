"""Folders that look like finished runs, without training."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .training_jobs import small_config

VERSIONS = {"smartprune": "0", "torch": "2", "python": "3", "system": "s", "device": "cpu", "threads": "1"}


def write_run(root: Path, pruned: float, dense: float = 0.9, **settings: Any) -> Path:
    """A run folder with a result, named after its settings."""
    name = "-".join(f"{value}" for value in settings.values()).replace("/", "_").replace(" ", "") or "plain"
    folder = root / name
    folder.mkdir(parents=True)
    config = small_config(folder, **settings)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    result: dict[str, Any] = {"folder": str(folder), "task": config.task, "model": config.model, "method": config.method}
    result |= {"measure": "accuracy", "dense": dense, "pruned": pruned, "verified": True, "seconds": 1.5}
    result |= {"samples": 100, "finished": "2026-01-02 03:04", "command": f"smartprune train {config.task}"}
    (folder / "result.json").write_text(json.dumps({**result, "stage_seconds": {}, "versions": VERSIONS, "also": {}, "files": {}}))
    return folder


def write_grid_of_runs(root: Path) -> Path:
    """Twelve runs: three methods, two sparsities, two seeds."""
    out = root / "runs"
    for method, value in (("magnitude", 0.5), ("gradual", 0.7), ("smart", 0.6)):
        for sparsity in (0.9, 0.5):
            for seed in (0, 1):
                loss = 0.1 * (sparsity == 0.9)
                write_run(out, value - loss + 0.02 * seed, 0.9 + 0.02 * seed, method=method, sparsity=sparsity, seed=seed)
    return out


def write_macs_left(folder: Path, total: int, kept: int) -> None:
    """A receipt that counts MACs and nothing else."""
    achieved = {"achieved": {"macs": {"total": total, "kept": kept, "removed": total - kept}}}
    (folder / "receipt.json").write_text(json.dumps(achieved))
