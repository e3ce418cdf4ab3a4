"""Settings of a run: their checks, their files, and what config.json stores."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.training_jobs import (
    ALL_OPTIONS,
    SMALL_SETTINGS,
    assert_same_run,
    small_config,
)
from smartprune import METHODS, SmartpruneError
from smartprune.training.config import configure, load_config
from smartprune.training.result import Result
from smartprune.training.train import train


def test_config_round_trip_repeats_the_run(finished_run: Path, tmp_path: Path) -> None:
    repeated = tmp_path / "again"
    torch.rand(3)  # what happened in the process before does not matter
    train(replace(load_config(finished_run / "config.json"), out=str(repeated)))
    assert_same_run(finished_run, repeated)
    first, second = (json.loads((path / "config.json").read_text()) for path in (finished_run, repeated))
    assert first | {"out": ""} == second | {"out": ""}


def test_config_json_holds_all_settings(finished_run: Path) -> None:
    config = json.loads((finished_run / "config.json").read_text())
    assert config["settings"] == asdict(METHODS["smart"]())
    assert config["task_settings"] == {"width": 4, "shift": 1}
    assert config["device"] == "cpu"


def test_config_json_holds_changed_settings(run_with_all_options: Path) -> None:
    import json

    config = json.loads((run_with_all_options / "config.json").read_text())
    assert {name: config[name] for name in ALL_OPTIONS} == ALL_OPTIONS
    assert Result.load(run_with_all_options).verified


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsity": 93}, r"sparsity=93\.0 is outside"),
        ({"sparsity": "0.9"}, "sparsity='0.9' must be"),
        ({"sparsity": math.nan}, "sparsity=nan must be"),
        ({"macs": 0.5, "sparsity": 0.5}, "sparsity=0.5 and macs=0.5: set exactly one of sparsity, macs, cycles, budget"),
        ({"sparsity": None}, "no budget: set exactly one of sparsity"),
        ({"block": "8y4"}, "block='8y4' cannot be read"),
        ({"lr": 0.0}, "lr=0.0 must be above 0"),
        ({"finetune_epochs": 0}, "finetune_epochs=0 must be above 0"),
        ({"dense_epochs": -1}, "dense_epochs=-1 must not be negative"),
        ({"batch": 1.5}, "batch=1.5 must be int"),
        ({"batch": True}, "batch=True must be int"),
        ({"seed": 2**32}, r"must be below 2\*\*32"),
        ({"device": "tpu"}, "device='tpu' must be one of auto, cpu, cuda"),
        ({"schedule": "step"}, "schedule='step' must be one of cosine, poly, linear, constant"),
        ({"method": "snip"}, "unknown method 'snip'; choose one of: smart"),
        ({"task": "mnist"}, "unknown task 'mnist'; choose one of: digits"),
        ({"model": "vgg"}, "model='vgg' is unknown to the task digits; its networks are: resnet8, resnet18"),
        ({"settings": {"strat": 1}}, "unknown setting 'strat' for smart; its settings are: start, end"),
        ({"settings": {"start": "hot"}}, "smart: start='hot' must be float"),
        ({"skip": "conv1"}, "skip='conv1' must be"),
        ({"epochs": 3}, "unknown setting 'epochs'; the settings of a run are: task,"),
    ],
)
def test_invalid_settings_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        configure({**SMALL_SETTINGS, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ema": 1.0}, r"ema=1\.0 must be at least 0 and below 1, such as 0\.999"),
        ({"ema": -0.1}, r"ema=-0\.1 must be at least 0"),
        ({"warmup_start": 1.5}, r"warmup_start=1\.5 must be from 0 to 1"),
        ({"warmup_epochs": 2.0}, r"warmup_epochs=2 must be shorter than the dense stage \(2 epochs\)"),
        ({"warmup_epochs": 1.5}, r"warmup_epochs=1\.5 must be shorter than the fine-tuning \(1 epochs\)"),
        ({"accumulate": 0}, "accumulate=0 must be above 0"),
        ({"accumulate": 1.5}, r"accumulate=1\.5 must be int"),
        ({"clip_norm": -1.0}, r"clip_norm=-1\.0 must not be negative"),
        ({"distill": -1.0}, r"distill=-1\.0 must not be negative"),
        ({"distill_temperature": 0.0}, r"distill_temperature=0\.0 must be above 0"),
        ({"poly_power": 0.0}, r"poly_power=0\.0 must be above 0"),
        ({"parallel": "tp"}, "parallel='tp' must be one of ddp, fsdp"),
        ({"tensorboard": "yes"}, "tensorboard='yes' must be one of on, off"),
        ({"deterministic": "maybe"}, "deterministic='maybe' must be one of on, off"),
    ],
)
def test_invalid_training_options_are_errors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=message):
        small_config(tmp_path / "a", **change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a configuration"),
        ("[1]", "holds a list"),
        ('{"sparsty": 1}', "unknown setting 'sparsty'"),
    ],
)
def test_invalid_configuration_files_are_errors(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SmartpruneError, match=message):
        load_config(tmp_path / "config.json")
