"""The Slurm script of a sweep, run with a stand-in for sbatch that runs every task of an array at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import smartprune as sp
from helpers.sweeps import CELL, finish, small_grid, sweep_arguments
from smartprune.cli import main
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.experiments.sweep.slurm import without_flags, write_script

SBATCH = """#!/bin/bash
echo "sbatch $*" >> "$RECORD"
options=()
while [ "${1#--}" != "$1" ]; do
  case "$1" in --array=*) last=${1##*-} ;; esac
  shift
done
for task in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$task bash "$@" || exit 1; done
echo "17;cluster"
"""
PYTHON = """#!/bin/bash
echo "$PWD: $*" >> "$RECORD"
"""


def tools(folder: Path) -> dict[str, str]:
    for name, text in (("sbatch", SBATCH), ("fake python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(folder / "record")}


def test_every_run_is_one_task_and_dense_models_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = tools(tmp_path)
    monkeypatch.chdir(tmp_path)
    cells = expand_grids([small_grid(seeds=(0, 1))])
    words = ["sweep", "--seeds", "0,1", "--slurm", "grid.sh", "--jobs=4", "--out", "out folder"]
    write_script(Path("grid.sh"), cells, Path("out folder"), words, str(tmp_path / "fake python"))
    subprocess.run(["bash", "grid.sh", "--gres=gpu:1"], env=environment, check=True, capture_output=True, timeout=60)
    lines = (tmp_path / "record").read_text().splitlines()
    name = {(method, seed): CELL.format(method, 0.5, seed) for method in ("smart", "magnitude") for seed in (0, 1)}
    command = f"{tmp_path}: -m smartprune sweep --seeds 0,1 --out out folder --jobs 1 --only "
    assert lines == [
        "sbatch --parsable --gres=gpu:1 --array=0-1 grid.sh first",
        command + name["smart", 0],
        command + name["smart", 1],
        "sbatch --parsable --gres=gpu:1 --dependency=afterany:17 --array=0-1 grid.sh rest",
        command + name["magnitude", 0],
        command + name["magnitude", 1],
    ]
    assert (tmp_path / "out folder" / "logs").is_dir()


def test_finished_runs_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, file = tmp_path / "out", tmp_path / "grid.sh"
    smart, magnitude = expand_grids([small_grid()])
    finish(out, smart)
    assert main(sweep_arguments(out, "--slurm", str(file))) == 0
    assert f"1 runs; submit them with: bash {file}" in capsys.readouterr().out
    assert magnitude.name in file.read_text()
    assert smart.name not in file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    finish(out, magnitude)
    with pytest.raises(sp.SmartpruneError, match="all runs of the grid are done"):
        write_script(file, [], out, [], "python")


def test_only_chooses_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = CELL.format("magnitude", 0.5, 0)
    assert main(sweep_arguments(tmp_path, "--only", name, "--list")) == 0
    listed = capsys.readouterr().out
    assert name in listed
    assert CELL.format("smart", 0.5, 0) not in listed
    with pytest.raises(SystemExit):
        main(sweep_arguments(tmp_path, "--only", "nothing"))
    assert f"no run of the grid matches; its runs are {CELL.format('smart', 0.5, 0)}" in capsys.readouterr().err


def test_only_takes_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(sweep_arguments(tmp_path, "--only", "*-magnitude-*", "--list")) == 0
    listed = capsys.readouterr().out
    assert CELL.format("magnitude", 0.5, 0) in listed
    assert "1 cells: 0 done, 0 recorded, 1 missing" in listed
    assert CELL.format("smart", 0.5, 0) not in listed


def test_flags_of_the_whole_sweep_are_not_given_to_tasks() -> None:
    words = ["sweep", "--jobs", "4", "--out=x", "--only=a", "--seeds", "0"]
    assert without_flags(words, ["--jobs", "--only"]) == ["sweep", "--out=x", "--seeds", "0"]
