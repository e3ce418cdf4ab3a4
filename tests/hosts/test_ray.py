"""``smartprune sweep --on ray`` and ray.train on a Ray cluster of two CPUs, compared with the same runs on this machine."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import smartprune as sp
from helpers.ray_clusters import ray_cluster
from helpers.sweeps import CELL, OPTIONS, small_grid, sweep_arguments
from helpers.training_jobs import assert_same_run, command, environment, small_config
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.run_files import CHECKPOINT, CONFIG, DENSE, RESULT
from smartprune.training.train import train

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed; run make hosts"),
]
EPOCHS = 20
GRID = ["--seeds", "0,1", "--dense-seed", "0", "--search-epochs", str(EPOCHS), "--checkpoint-seconds", "0.05", "--on", "ray"]
WAIT = 800  # seconds; much longer than it takes
RUNS = [CELL.format(method, 0.5, seed) for method in ("smart", "magnitude") for seed in (0, 1)]
KILLED, DAMAGED = RUNS[0], RUNS[-1]


class Swept(NamedTuple):
    """A grid on Ray, whose first run lost its worker and whose last run is damaged, and its healthy runs without a sweep."""

    out: Path
    local: Path
    code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with ray_cluster(cpus=2) as variables:
        yield variables


def starts(out: Path, name: str) -> list[str]:
    """The commands that were started for a run."""
    log = (out / "logs" / f"{name}.log").read_text()
    return [line for line in log.splitlines() if line.startswith("$ ")]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def started(words: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A sweep in a process of its own, which ends with the context at the latest."""
    pipe = subprocess.PIPE
    python = [word for word in command(*words) if word not in ("-W", "error")]  # warnings of Ray are not ours
    sweep = subprocess.Popen(python, env={**environment(), **variables}, text=True, stdout=pipe, stderr=pipe)
    try:
        yield sweep
    finally:
        if sweep.poll() is None:
            sweep.terminate()
            sweep.communicate()


@pytest.fixture(scope="module")
def swept(cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Swept:
    out, local = (tmp_path_factory.mktemp("sweeps") / name for name in ("ray", "local"))
    train(small_config(local / "dense", search_epochs=1))
    options = {**OPTIONS, "search_epochs": EPOCHS, "checkpoint_seconds": 0.05}
    for cell in expand_grids([small_grid(seeds=(0, 1), dense_seed=0, options=options)]):
        train(replace(cell.config, out=str(cell.folder(local)), dense=str(local / "dense" / DENSE)))
    damaged = out / DAMAGED
    damaged.mkdir(parents=True)
    (damaged / CONFIG).write_text(json.dumps(asdict(cell.config) | {"out": str(damaged)}))
    (damaged / CHECKPOINT).write_bytes(b"nonsense")
    with started(sweep_arguments(out, *GRID), cluster) as sweep:
        wait_for((out / KILLED / CHECKPOINT).exists, sweep)
        os.kill(worker_of(out, KILLED), signal.SIGKILL)
        stdout, stderr = sweep.communicate(timeout=WAIT)
    return Swept(out, local, sweep.returncode, stdout, stderr)


def worker_of(out: Path, name: str) -> int:
    """The process that the last line of a log of this kind names."""
    return int(re.findall(r"^# on .*, process (\d+)$", (out / "logs" / f"{name}.log").read_text(), re.M)[-1])


def test_a_grid_on_ray_writes_the_run_folders_of_a_local_sweep(swept: Swept) -> None:
    for name in RUNS[:-1]:
        assert_same_run(swept.out / name, swept.local / name)
        files = [{path.name for path in (folder / name).iterdir()} for folder in (swept.out, swept.local)]
        assert files[0] == files[1]
    (dense,) = (swept.out / "dense").iterdir()
    assert dense.read_bytes() == (swept.local / "dense" / DENSE).read_bytes()
    assert not list((swept.out / "logs").glob(".ray-*"))
    assert "smart" in swept.stdout


def test_a_run_whose_worker_is_killed_resumes_with_the_same_bits(swept: Swept) -> None:
    first, second = starts(swept.out, KILLED)
    assert "--config" in first
    assert "--resume" in second
    assert_same_run(swept.out / KILLED, swept.local / KILLED)
    assert all(len(starts(swept.out, name)) == 1 for name in RUNS if name != KILLED)


def test_a_failing_run_is_reported_and_the_others_finish(swept: Swept) -> None:
    assert swept.code == 1
    assert f"{DAMAGED} failed with exit code 1; the end of {swept.out / 'logs' / DAMAGED}.log:" in swept.stderr
    assert f"{CHECKPOINT} is damaged" in swept.stderr
    assert "3 runs done, 1 failed; repeat the same command to continue" in swept.stderr
    assert len(starts(swept.out, DAMAGED)) == 1, "an error of the run itself is not tried again"


def test_an_interrupted_sweep_on_ray_resumes_with_the_same_bits(swept: Swept, cluster: dict[str, str]) -> None:
    """Without the damaged folder, the same command makes the missing run. Ctrl-C lets it write a checkpoint."""
    folder, log = swept.out / DAMAGED, swept.out / "logs" / f"{DAMAGED}.log"
    shutil.rmtree(folder)
    log.unlink()
    with started(sweep_arguments(swept.out, *GRID), cluster) as sweep:
        wait_for((folder / CHECKPOINT).exists, sweep)
        sweep.send_signal(signal.SIGINT)
        _, errors = sweep.communicate(timeout=WAIT)
    assert sweep.returncode == 1
    assert "3 runs done, 1 missing (stopped); repeat the same command to continue" in errors
    assert "stopping: writing a checkpoint" in log.read_text()
    assert not (folder / RESULT).exists()
    with started(sweep_arguments(swept.out, *GRID), cluster) as sweep:
        _, errors = sweep.communicate(timeout=WAIT)
    assert sweep.returncode == 0, errors
    assert ["--resume" in line for line in starts(swept.out, DAMAGED)] == [False, True]
    assert all(len(starts(swept.out, name)) == 1 for name in RUNS[1:-1]), "finished runs are not run again"
    assert_same_run(folder, swept.local / DAMAGED)


def run_example(folder: Path, variables: dict[str, str], *flags: str) -> dict[str, Any]:
    script = Path(__file__).parents[2] / "examples" / "with_ray.py"
    words = [sys.executable, str(script), "--out", str(folder), *flags]
    done = subprocess.run(words, env={**environment(), **variables}, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_ray_train_with_two_workers_resumes_bit_exactly_in_mid_search(cluster: dict[str, str], tmp_path: Path) -> None:
    """Both workers have the same weights, with the exact number of blocks, in a plain checkpoint."""
    whole = run_example(tmp_path / "whole", cluster)
    assert run_example(tmp_path / "part", cluster, "--epochs", "1") == {"epoch": 1, "phase": "search"}
    part = run_example(tmp_path / "part", cluster)
    assert (whole.pop("resumed at"), part.pop("resumed at")) == (0, 1)
    assert whole == part
    assert len(whole["weights"]) == 2
    assert len(set(whole["weights"])) == 1
    receipt = sp.Receipt.load(tmp_path / "part" / "last" / "receipt.json")
    weights = torch.load(tmp_path / "part" / "last" / "model.pt")
    assert list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    kept = 0
    for row in receipt.layers:
        for rows in weights[row.weight].split(8):
            kept += sum(bool(block.any()) for block in rows.split(4, dim=1))
    assert kept == receipt.blocks.kept == receipt.blocks.total // 2
