"""``smartprune train``: run folders, configuration files and resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.training_jobs import SMALL_FLAGS, assert_same_run, run_cli
from smartprune import NPU
from smartprune.experiments.compare.identity import protocol
from smartprune.training.page import run_cycles

pytestmark = pytest.mark.usefixtures("in_work_folder")


def test_default_folder_is_numbered(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [*SMALL_FLAGS, "--dense", "runs/a/dense.safetensors", "--search-epochs", "1"]
    assert run_cli("train", *short) == 0
    assert run_cli("train", *short) == 0
    assert (work / "runs/digits-smart-4x2-0.5-s0/result.json").exists()
    assert (work / "runs/digits-smart-4x2-0.5-s0-2/result.json").exists()
    capsys.readouterr()
    assert run_cli("train", *short, "--resume") == 0
    captured = capsys.readouterr()
    assert "the run in runs/digits-smart-4x2-0.5-s0-2 is already finished" in captured.err
    assert "folder   runs/digits-smart-4x2-0.5-s0-2" in captured.out


def test_config_repeats_the_run(work: Path) -> None:
    assert run_cli("train", "--config", "runs/a/config.json", "--out", "runs/repeated") == 0
    assert_same_run(work / "runs/a", work / "runs/repeated")


def test_flags_take_precedence_over_the_configuration_file(work: Path) -> None:
    flags = [
        "--method",
        "magnitude",
        "--sparsity",
        "0.75",
        "--search-epochs",
        "1",
        "--dense",
        "runs/a/dense.safetensors",
    ]
    assert run_cli("train", "--config", "runs/a/config.json", *flags, "--out", "runs/m") == 0
    config = json.loads((work / "runs/m/config.json").read_text())
    assert (config["method"], config["sparsity"], config["block"]) == ("magnitude", 0.75, "4x2")
    assert Path(config["dense"]).is_absolute()
    assert run_cli("train", "--config", "runs/a/config.json", *flags[4:], "--macs", "0.5", "--out", "runs/n") == 0
    config = json.loads((work / "runs/n/config.json").read_text())
    assert (config["sparsity"], config["macs"]) == (None, 0.5)


def test_npu_file_is_found_from_another_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "own.json").write_text(json.dumps(NPU.small().to_json()))
    short = [
        *SMALL_FLAGS[: SMALL_FLAGS.index("--sparsity")],
        "--dense",
        "runs/a/dense.safetensors",
        "--search-epochs",
        "1",
        "--onnx",
        "off",
    ]
    assert run_cli("train", *short, "--cycles", "0.3", "--npu", "own.json", "--out", "runs/npu") == 0
    config = json.loads((work / "runs/npu/config.json").read_text())
    assert Path(config["npu"]) == work / "own.json"
    assert protocol(config) == protocol({**config, "npu": "own.json"})  # a comparison has its name alone
    monkeypatch.chdir(work / "runs")
    assert run_cycles("npu") is not None


def test_set_gives_settings_of_the_method(work: Path) -> None:
    short = [*SMALL_FLAGS, "--dense", "runs/a/dense.safetensors", "--search-epochs", "1", "--out", "runs/set"]
    assert run_cli("train", *short, "--set", "start=2", "--set", "ramp=cubic", "--set", "clip=none") == 0
    settings = json.loads((work / "runs/set/config.json").read_text())["settings"]
    assert (settings["start"], settings["ramp"], settings["clip"]) == (2, "cubic", None)


def test_resume_accepts_automatic_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """What was left to the machine, by auto or by 0 threads, is decided in config.json."""
    arguments = ["train", *SMALL_FLAGS, "--device", "auto", "--threads", "0", "--resume", "--out", "runs/a"]
    assert run_cli(*arguments) == 0
    assert "is already finished" in capsys.readouterr().err
    assert run_cli(*arguments, "--threads", "77") == 2


def test_json_has_result_and_receipt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("train", "--resume", "--out", "runs/a", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verified"] is True
    assert data["receipt"]["achieved"]["met"] is True


def test_resume_with_an_unknown_setting_is_an_error(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert run_cli("train", "--resume", "--config", str(tmp_path / "c.json"), "--out", str(finished_run)) == 2
    assert "unknown setting 'a'; the settings of a run are: task" in capsys.readouterr().err
