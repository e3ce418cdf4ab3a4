"""Runs the shell commands of docs/training.md."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training_jobs import ALL_OPTIONS, small_config
from smartprune.cli import main
from smartprune.tasks.digits import Digits
from smartprune.training.train import train

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LINES = [
    shlex.split(line, comments=True)
    for text in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)
    for line in text.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(small_config(out, **ALL_OPTIONS))
    return out


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_commands_of_the_training_page_run(
    words: list[str], finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With short stages, and with the runs that the page resumes or repeats."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "smartprune.tasks.digits.Digits.recipe", replace(Digits.recipe, dense_epochs=1, search_epochs=1, finetune_epochs=1)
    )
    if words[0] == "torchrun":
        words = words[words.index("smartprune") :]
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setenv("RANK", "0")
    assert words[0] == "smartprune"
    if words[1] in ("sweep", "compare"):
        shutil.copytree(PAGE.parent.parent / "records", tmp_path / "records")
        shutil.copytree(finished_run, tmp_path / "runs" / "paper" / "a")
        words = words + ["--list"] * (words[1] == "sweep" and "--list" not in words)  # the paper's table takes days
    if "--resume" in words or "--config" in words:
        shutil.copytree(finished_run, tmp_path / "runs" / "a")
        shutil.copytree(finished_run, tmp_path / "runs" / "c")
    assert main(words[1:]) == 0
