"""Settings of a run from flags and configuration files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.training_jobs import small_config
from smartprune import SmartpruneError
from smartprune.cli.common import Parser
from smartprune.cli.settings import requested_settings
from smartprune.cli.train import add_train
from smartprune.training.config import configure


def test_task_argument_completes_a_file_without_a_task(tmp_path: Path) -> None:
    """What the file does not say comes from the task that the command names."""
    (tmp_path / "f.json").write_text('{"sparsity": 0.8}')
    parser = Parser()
    add_train(parser.add_subparsers())
    args = parser.parse_args(["train", "scenes", "--config", str(tmp_path / "f.json")])
    settings = requested_settings(args)
    assert configure(settings).model == "segnet"
    assert settings["sparsity"] == 0.8
    (tmp_path / "f.json").write_text('{"sparsity": 0.8, "sparsity": 0.9}')
    with pytest.raises(SmartpruneError, match="duplicate key"):
        requested_settings(args)
    (tmp_path / "f.json").write_text('{"lr": ' + "9" * 400 + "}")
    with pytest.raises(SmartpruneError, match="lr="):
        configure(requested_settings(args))
    (tmp_path / "f.json").write_text(json.dumps(asdict(small_config(tmp_path / "x"))))
    more = parser.parse_args(["train", "scenes", "--config", str(tmp_path / "f.json"), "--model", "segnet", "--block", "8x4"])
    assert configure(requested_settings(more)).model == "segnet"  # flags are in place of what the file says


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--set", "ramp=none"], {"ramp": "none"}),
        (["--set", "reach=none"], {"reach": None}),
        (["--set", "end=1e-4", "--set", "follow=false"], {"end": 1e-4, "follow": False}),
        (["--task", "imagefolder", "--task-set", "folder=2012", "--task-set", "size=64"], {"folder": "2012", "size": 64}),
    ],
)
def test_setting_is_parsed_as_its_type(words: list[str], settings: dict[str, object]) -> None:
    """``none`` is a word in one setting and nothing in another, and a folder may be called by a number."""
    parser = Parser()
    add_train(parser.add_subparsers())
    task, words = (words[1:2], words[2:]) if words[0] == "--task" else ([], words)
    config = configure(requested_settings(parser.parse_args(["train", *task, *words])))
    parsed = {**config.task_settings, **config.settings}
    assert {name: parsed[name] for name in settings} == settings


@pytest.mark.parametrize("words", [["--set", "end=1e-4"], ["--task-set", "width=8"], ["--data", "here"]])
def test_settings_of_a_wrong_type_in_a_file_are_an_error(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('{"settings": 5, "task_settings": [1]}')
    parser = Parser()
    add_train(parser.add_subparsers())
    with pytest.raises(SmartpruneError, match=r"settings=(5|\[1\]) must be dict"):
        configure(requested_settings(parser.parse_args(["train", "--config", str(tmp_path / "f.json"), *words])))
