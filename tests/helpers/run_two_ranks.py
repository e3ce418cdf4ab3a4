"""One of two ranks: ``python tests/helpers/run_two_ranks.py RANK FOLDER``. tests/training/test_ranks.py checks the results."""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from helpers import plain_task
from helpers.training_jobs import small_config
from smartprune import SmartpruneError
from smartprune.training.config import Config, configure
from smartprune.training.train import resume, train

ALL_OPTIONS: dict[str, Any] = {
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


def job_config(out: Path, **changes: Any) -> Config:
    settings = {"dense_epochs": 3, "search_epochs": 2, "finetune_epochs": 2, "batch": 128, "sparsity": 0.5}
    return configure({"task": "plain", **settings, "out": str(out), **changes})


class StopAfter:
    """Requests a stop after a number of steps if ``active``, that is, on one of the ranks."""

    def __init__(self, steps: int, active: bool = True) -> None:
        self.steps_left, self.active = steps, active

    def __call__(self) -> bool:
        self.steps_left -= 1
        return self.active and self.steps_left <= 0


def train_until_stopped(config: Config, steps: int, active: bool = True) -> None:
    with suppress(SmartpruneError):
        train(config, stop=StopAfter(steps, active))
        raise AssertionError("training was not stopped")


def error_of(config: Config) -> str:
    """The message of the error that training raises, or "no error"."""
    try:
        train(config)
    except SmartpruneError as error:
        return str(error)
    return "no error"


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    stages: list[str] = []
    train(job_config(folder / "ddp"), progress=lambda tick: stages.append(tick.stage))
    train(job_config(folder / "fsdp", parallel="fsdp"))
    for parallel in ("ddp", "fsdp"):
        train(job_config(folder / f"{parallel}-all", parallel=parallel, **ALL_OPTIONS))
        out = folder / f"{parallel}-resumed"
        train_until_stopped(job_config(out, parallel=parallel, **ALL_OPTIONS), 7, active=rank == 1)
        with suppress(SmartpruneError):  # the first stop is in the dense stage, this one in the search
            resume(out, stop=StopAfter(8, rank == 0))
        resume(out)
        resume(folder / f"one-to-{parallel}")
        train_until_stopped(job_config(folder / f"{parallel}-to-one", parallel=parallel, **ALL_OPTIONS), 15)
    for parallel in ("ddp", "fsdp"):
        train(small_config(folder / f"{parallel}-batchnorm", ema=0.9, parallel=parallel))
    methods = {}
    for method in ("gradual", "awg", "pdp"):
        methods[method] = error_of(job_config(folder / method, method=method, parallel="fsdp", search_epochs=3))
    invalid = [{"batch": 127}, {"graph": "on"}, {"batch": 4096}, {"sync_bn": "on"}]
    errors = [error_of(job_config(folder / "ddp")), *(error_of(job_config(folder / "x", **changes)) for changes in invalid)]
    plain_task.PlainTask.fails = 10 if rank == 1 else 0
    failure = error_of(job_config(folder / "nan"))  # rank 0 notices when rank 1 exits
    results = {"ticks": len(stages), "methods": methods, "errors": errors, "failure": failure}
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    os._exit(0)


if __name__ == "__main__":
    assert plain_task.TASKS["plain"] is plain_task.PlainTask
    main(int(sys.argv[1]), Path(sys.argv[2]))
