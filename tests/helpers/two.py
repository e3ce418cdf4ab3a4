"""One of two processes that work at the same runs: ``python tests/two.py RANK FOLDER``. What is checked is in test_ranks.py."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from helpers import plain
from helpers.jobs import small
from smartprune import SmartpruneError
from smartprune.training.config import Config, configure
from smartprune.training.train import resume, train

ALL: dict[str, Any] = {
    "schedule": "poly",
    "warmup_epochs": 0.5,
    "ema": 0.9,
    "distill": 0.5,
    "augment": 1.0,
    "augment_over": "all",
    "clip_norm": 1.0,
    "batch": 64,
    "accumulate": 4,
}


def job(out: Path, **changes: Any) -> Config:
    given = {"dense_epochs": 3, "search_epochs": 2, "finetune_epochs": 2, "batch": 128, "sparsity": 0.5}
    return configure({"task": "plain", **given, "out": str(out), **changes})


class After:
    """Asks to stop after so many steps, on one of the ranks."""

    def __init__(self, steps: int, here: bool = True) -> None:
        self.left, self.here = steps, here

    def __call__(self) -> bool:
        self.left -= 1
        return self.here and self.left <= 0


def stopped(config: Config, steps: int, here: bool = True) -> None:
    with suppress(SmartpruneError):
        train(config, stop=After(steps, here))
        raise AssertionError("it should have stopped")


def said(config: Config) -> str:
    try:
        train(config)
    except SmartpruneError as error:
        return str(error)
    return "nothing"


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    shown: list[str] = []
    train(job(folder / "ddp"), progress=lambda tick: shown.append(tick.stage))
    train(job(folder / "fsdp", parallel="fsdp"))
    for parallel in ("ddp", "fsdp"):
        train(job(folder / f"{parallel}-all", parallel=parallel, **ALL))
        out = folder / f"{parallel}-again"
        stopped(job(out, parallel=parallel, **ALL), 7, here=rank == 1)
        with suppress(SmartpruneError):  # first in the dense stage, then in the search
            resume(out, stop=After(8, rank == 0))
        resume(out)
        resume(folder / f"one-to-{parallel}")
        stopped(job(folder / f"{parallel}-to-one", parallel=parallel, **ALL), 15)
    for parallel in ("ddp", "fsdp"):
        train(small(folder / f"{parallel}-batchnorm", ema=0.9, parallel=parallel))
    methods = {}
    for method in ("gradual", "awg", "pdp"):
        methods[method] = said(job(folder / method, method=method, parallel="fsdp", search_epochs=3))
    wrong = [said(job(folder / "ddp")), said(job(folder / "x", batch=127)), said(job(folder / "x", graph="on"))]
    wrong += [said(job(folder / "x", batch=4096)), said(job(folder / "x", sync_bn="on"))]
    plain.Plain.fails = 10 if rank == 1 else 0
    failed = said(job(folder / "nan"))  # the first rank learns of it when the second one ends
    told = {"shown": len(shown), "methods": methods, "wrong": wrong, "failed": failed}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    os._exit(0)


if __name__ == "__main__":
    assert plain.TASKS["plain"] is plain.Plain
    main(int(sys.argv[1]), Path(sys.argv[2]))
