"""``smartprune sweep``: its arguments and their errors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from helpers.sweeps import sweep_arguments
from helpers.training_jobs import small_config
from smartprune.cli import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jobs", "0"], "--jobs 0 must be at least 1"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--cpus", "2"], "--cpus 2 is for runs on Ray; add --on ray"),
        (["--gpus", "1"], "--gpus 1 is for runs on Ray; add --on ray"),
        (["--on", "ray", "--cpus", "0"], "--cpus 0 must be at least 1"),
        (["--on", "ray", "--gpus", "2"], "--gpus 2 must be from 0 to 1"),
        (["--on", "ray", "--slurm", "a.sh"], "--slurm and --on ray: give only one of them"),
        (["--on", "ray", "--mps"], "--mps and --on ray: give only one of them"),
        (["--seeds", "a"], "--seeds a must be a list with commas"),
        (["--methods", "snip"], "unknown method 'snip'"),
        (["--set", "start=2"], "write METHOD.NAME=VALUE, such as smart.start=2"),
        (["--set", "smart.strat=2"], "unknown setting 'strat' for smart"),
        (["--set", "pdp.end=2"], "settings for pdp"),
        (["--sparsities", "93"], "sparsity=93"),
        (["--grid", "grid.json"], "--grid and --methods"),
        (["--macs", "0.5"], "--sparsities and --macs"),
        (["--sparsity", "0.5"], "unrecognized arguments: --sparsity"),
        (["--label", "a b"], "label 'a b' must be a word"),
        (["--dense-seed", "-1"], "dense_seed -1 must be an integer"),
        (["--dense-seed", "0", "--dense", "d.safetensors"], "give only one of them"),
        (["--recorded", "no/such/folder"], "no/such/folder is not a folder"),
        (["--recorded", str(Path(__file__).parent)], "holds no record"),
    ],
)
def test_wrong_arguments_exit_2(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(sweep_arguments(tmp_path / "out", *flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_grid_files_exclude_the_flags_of_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--label", "a"], ["--dense-seed", "0"]):
        with pytest.raises(SystemExit):
            main(["sweep", "--grid", "grid.json", "--out", str(tmp_path / "out"), *flags])
        assert f"--grid and {flags[0]}: the file sets it too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "smart.ramp=zzz"], "zzz"),
        (["--floor", "0.9"], "floor=0.9 needs"),
        (["--model", "nosuch:x"], "nosuch"),
        (["--dense", "none.safetensors"], "none.safetensors cannot be read as a .safetensors file (No such file or directory)"),
    ],
)
def test_settings_of_all_runs_are_checked_before_the_first_dense_stage(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(sweep_arguments(tmp_path / "out", *flags))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["macs", "cycles"])
def test_two_budgets_are_an_error(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(sweep_arguments(tmp_path / "a", f"--{kind}", "0.5"))
    assert stop.value.code == 2
    assert f"--sparsities and --{kind}" in capsys.readouterr().err
    file = tmp_path / "grid.json"
    file.write_text(json.dumps({"sparsities": [0.9], "options": {kind: 0.5}}))
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "--grid", str(file), "--out", str(tmp_path / "b")])
    assert stop.value.code == 2
    assert f"sparsities and {kind}" in capsys.readouterr().err
    file.write_text(json.dumps({"sparsities": [0.9]}))
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "--grid", str(file), f"--{kind}", "0.5", "--out", str(tmp_path / "b")])
    assert stop.value.code == 2


def list_cells(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The names of the cells of a sweep."""
    assert main(["sweep", *arguments, "--list"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    return [line.split()[1] for line in lines]


def test_lists_take_precedence_over_a_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file provides the method, settings, budget and seed that no list sets."""
    file, out = tmp_path / "c.json", ["--out", str(tmp_path / "out")]
    file.write_text(json.dumps(asdict(small_config(tmp_path / "run", seed=3, settings={"ramp": "cubic"}))))
    arguments = ["--config", str(file), *out]
    assert list_cells(capsys, *arguments) == ["digits-resnet8-smart-ramp=cubic-4x2-0.5-s3"]
    assert list_cells(capsys, *arguments, "--seeds", "1") == ["digits-resnet8-smart-ramp=cubic-4x2-0.5-s1"]
    assert list_cells(capsys, *arguments, "--set", "smart.ramp=none") == ["digits-resnet8-smart-ramp=none-4x2-0.5-s3"]
    assert list_cells(capsys, *arguments, "--methods", "gradual") == ["digits-resnet8-gradual-4x2-0.5-s3"]
    assert list_cells(capsys, *arguments, "--macs", "0.4") == ["digits-resnet8-smart-ramp=cubic-4x2-macs0.4-s3"]
    file.write_text(json.dumps({"macs": 0.5, "block": "4x2"}))
    assert list_cells(capsys, *arguments) == ["digits-resnet8-smart-4x2-macs0.5-s0"]
    assert list_cells(capsys, *arguments, "--sparsities", "0.7") == ["digits-resnet8-smart-4x2-0.7-s0"]


@pytest.mark.parametrize("flag", ["--methods", "--sparsities", "--seeds"])
def test_an_empty_list_is_an_error(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", flag, "", "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert f"{flag} '' must be a list" in capsys.readouterr().err
