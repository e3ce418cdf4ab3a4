"""Training jobs that take about a second, and ways to run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smartprune
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.training.config import Config, configure
from smartprune.training.train import train

SMALL_SETTINGS: dict[str, Any] = {
    "task_settings": {"width": 4},
    "block": "4x2",
    "dense_epochs": 2,
    "search_epochs": 2,
    "finetune_epochs": 1,
    "batch": 128,
    "sparsity": 0.5,
    "onnx": "off",
}
SMALL_FLAGS = [
    "--task-set", "width=4", "--block", "4x2", "--dense-epochs", "2", "--search-epochs", "2", "--finetune-epochs", "1",
    "--batch", "128", "--sparsity", "0.5", "--onnx", "off",
]  # fmt: skip
EXACT_FILES = ("dense.safetensors", "model.safetensors", "receipt.json")


def small_config(out: Path, **changes: Any) -> Config:
    return configure({**SMALL_SETTINGS, "out": str(out), **changes})


def command(*arguments: str) -> list[str]:
    """The command line of a smartprune command that turns warnings into errors."""
    return [sys.executable, "-W", "error", "-m", "smartprune", *arguments]


def environment() -> dict[str, str]:
    """Environment variables of a process that imports this source tree."""
    source = str(Path(smartprune.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def run_in_subprocess(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a smartprune command in a new process."""
    return subprocess.run(command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def run_cli(*arguments: object) -> int:
    """Runs a smartprune command in this process and returns its exit code."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, without the seconds."""
    out = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in out:
        row.pop("seconds")
    return out


def assert_same_run(a: Path, b: Path) -> None:
    """Checks that two runs wrote the same files, the same metrics and the same results."""
    for name in EXACT_FILES:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert metric_rows(a) == metric_rows(b)
    first, second = (json.loads((path / "result.json").read_text()) for path in (a, b))
    for key in ("dense", "pruned", "measure", "verified"):
        assert first[key] == second[key]


ALL_OPTIONS: dict[str, Any] = {
    "schedule": "poly",
    "search_schedule": "linear",
    "warmup_epochs": 0.5,
    "ema": 0.9,
    "distill": 0.5,
    "augment": 1.0,
    "augment_over": "all",
    "clip_norm": 1.0,
    "batch": 64,
    "accumulate": 4,  # 14 batches: three steps of four, and one of two
    "deterministic": "on",
}


class StopAfter:
    """A ``stop`` function that stops a run after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def stopped_run(out: Path) -> None:
    """Makes a run that is stopped after 20 of its 35 steps, in the search."""
    with pytest.raises(SmartpruneError, match="stopped"):
        train(small_config(out), stop=StopAfter(20))
