"""A run folder or a configuration file cannot choose which code runs, unless the user names or trusts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.training_jobs import SMALL_SETTINGS
from smartprune.cli import main
from smartprune.errors import SmartpruneError
from smartprune.training.config import configure
from smartprune.training.train import resume, train, train_dense

MODEL = "chosen_net:build"
SOURCE = """
from pathlib import Path
from torch import nn

Path("imported").touch()


def build(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.Linear(8, num_classes))
"""
FILES = [
    "eval runs/a",
    "export runs/a --out a.onnx",
    "bench runs/a --batch 1 --seconds 0.01 --rounds 1 --engines torch --no-layers",
]
FILES += ["report runs/a --npu edge"]
CONFIGS = ["train --config {config} --out runs/new", "train --config {config} --settings", "sweep --config {config} --out runs/s"]
CONFIGS += ["sweep --grid grid.json --out runs/s"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run whose network is a function in a file beside it."""
    folder = tmp_path_factory.mktemp("trust")
    (folder / "chosen_net.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(configure({**SMALL_SETTINGS, "model": MODEL, "out": "runs/a"}))
    grid = {"options": {"model": MODEL, "block": "4x2"}}
    (folder / "grid.json").write_text(json.dumps(grid))
    return folder


@pytest.fixture
def folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder as the working directory, as a new process finds it."""
    monkeypatch.chdir(trained)
    sys.modules.pop("chosen_net", None)
    (trained / "imported").unlink(missing_ok=True)
    return trained


@pytest.mark.parametrize("command", [*FILES, *CONFIGS, "train --resume --out runs/b", "train --resume --dense-only --out runs/b"])
def test_files_cannot_choose_which_code_runs(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "runs/b" in command:
        (folder / "runs/b").mkdir(exist_ok=True)
        (folder / "runs/b/config.json").write_text((folder / "runs/a/config.json").read_text())
    with_settings = "--settings" in command
    try:
        code: object = main(command.format(config="runs/a/config.json").split())
    except SystemExit as error:
        code = error.code
    if not with_settings:  # which prints the settings and imports nothing
        assert code
        message = capsys.readouterr().err
        assert "model is chosen_net:build, a function that would be imported and run, and only this file names it" in message
        assert "add --trust" in message or "or --trust" in message
    assert not (folder / "imported").exists()


def test_untrusted_functions_do_not_run_when_a_page_is_missing(folder: Path) -> None:
    (folder / "runs/a/report.html").unlink(missing_ok=True)
    assert main(["train", "--resume", "--out", "runs/a"]) == 0
    assert (folder / "runs/a/report.html").exists()
    assert not (folder / "imported").exists()


@pytest.mark.parametrize(
    "command", ["compare runs/a", "watch runs/a --once", "verify runs/a", "report runs/a", "report runs/a --html a.html"]
)
def test_other_commands_read_such_a_folder_without_importing(folder: Path, command: str) -> None:
    assert main(command.split()) == 0
    assert not (folder / "imported").exists()


@pytest.mark.parametrize("flags", ["--trust", f"--model {MODEL}"])
def test_named_and_trusted_functions_run_and_are_shown(folder: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/a", *flags.split()]) == 0
    assert (folder / "imported").exists()
    assert "runs/a/config.json: imports chosen_net and calls build" in capsys.readouterr().err


@pytest.mark.parametrize("command", FILES[3:])
def test_trusted_folders_work(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--trust"]) == 0
    assert (folder / "imported").exists()
    assert "imports chosen_net and calls build" in capsys.readouterr().err


def test_another_named_function_is_not_that_of_the_file(folder: Path) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--out", "runs/a", "--model", "other:build"])
    assert not (folder / "imported").exists()


def test_resume_needs_trust(folder: Path) -> None:
    (folder / "runs/c").mkdir(exist_ok=True)
    (folder / "runs/c/config.json").write_text((folder / "runs/a/config.json").read_text())
    for call in (lambda: resume("runs/c"), lambda: train_dense(Path("runs/c"), None, lambda tick: None, lambda: False)):
        with pytest.raises(SmartpruneError, match="if you trust the file, add trust=True"):
            call()
    assert not (folder / "imported").exists()
    assert resume("runs/c", trust=True).verified
