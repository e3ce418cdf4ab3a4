"""Small training runs for the tests: the whole job in about a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import smartprune
from smartprune.cli import main
from smartprune.training.config import Config, configure

SMALL: dict[str, Any] = {
    "task_settings": {"width": 4},
    "block": "4x2",
    "dense_epochs": 2,
    "search_epochs": 2,
    "finetune_epochs": 1,
    "batch": 128,
    "sparsity": 0.5,
    "onnx": "off",
}
FLAGS = [
    "--task-set", "width=4", "--block", "4x2", "--dense-epochs", "2", "--search-epochs", "2", "--finetune-epochs", "1",
    "--batch", "128", "--sparsity", "0.5", "--onnx", "off",
]  # fmt: skip
EXACT = ("dense.safetensors", "model.safetensors", "receipt.json")


def small(out: Path, **changes: Any) -> Config:
    return configure({**SMALL, "out": str(out), **changes})


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "smartprune", *arguments]


def environment() -> dict[str, str]:
    source = str(Path(smartprune.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    return subprocess.run(command(*arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def run(*arguments: object) -> int:
    """The exit code of a command in this process."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without the time they took."""
    out = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in out:
        row.pop("seconds")
    return out


def assert_same_run(a: Path, b: Path) -> None:
    """Two runs ended with the same bytes, and told the same on the way."""
    for name in EXACT:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert rows(a) == rows(b)
    first, second = (json.loads((path / "result.json").read_text()) for path in (a, b))
    for key in ("dense", "pruned", "measure", "verified"):
        assert first[key] == second[key]
