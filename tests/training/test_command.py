"""The command of a run, read again by the command line."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import Any

import pytest

from smartprune.cli import main
from smartprune.training.command import AUTOMATIC, train_command
from smartprune.training.config import configure

RUNS: list[dict[str, Any]] = [
    {"task": "digits"},
    {"task": "digits", "method": "gradual", "seed": 3, "search_epochs": 5, "skip": ["stages.0.*", "a b"]},
    {"task": "digits", "macs": 0.5, "settings": {"ramp": "cubic", "reach": None, "follow": False}, "block": "4x4", "ema": 0.99},
    {"task": "digits", "budget": "params=0.7", "task_settings": {"width": 12}, "augment": 0.5},
    {"task": "scenes", "sparsity": 0.6, "schedule": "poly"},
]


@pytest.mark.parametrize("settings", RUNS, ids=str)
def test_command_gives_the_settings_of_the_run(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(settings)
    words = shlex.split(train_command(config))
    assert words[0] == "smartprune"
    assert main([*words[1:], "--settings"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    wanted = json.loads(json.dumps(asdict(config)))
    assert {k: v for k, v in repeated.items() if k not in AUTOMATIC} == {k: v for k, v in wanted.items() if k not in AUTOMATIC}


def test_a_run_with_default_settings_has_a_short_command() -> None:
    assert train_command(configure({"task": "digits", "device": "cpu", "threads": 1})) == "smartprune train digits"
