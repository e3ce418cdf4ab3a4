"""Run folders with metrics, as a running job writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG = {
    "model": "resnet8",
    "task": "digits",
    "method": "smart",
    "dense": None,
    "dense_epochs": 2,
    "search_epochs": 3,
    "finetune_epochs": 1,
}


def metric_row(stage: str, epoch: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "epoch": epoch, "step": 10 * epoch, "loss": 1 / epoch, "accuracy": None, "seconds": seconds, **more}


ROWS = [
    metric_row("dense", 1, 1.0, accuracy=0.5),
    metric_row("dense", 2, 2.0, accuracy=0.75),
    metric_row("search", 1, 5.0, tau=0.1, undecided=100, changed=3),
    metric_row("search", 2, 8.0, tau=0.01, undecided=7, changed=1),
]


def write_run_folder(path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return path
