"""A grid of runs: in order, nothing lost and nothing twice after a kill, failures told at the end."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jobs import FLAGS, SMALL, assert_same_run, command, environment, small
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.sweep import Sweep, noted
from smartprune.sweep.board import Board, Line, State
from smartprune.sweep.grid import Grid, dense_config, dense_name, lay_out, read_grids
from smartprune.sweep.job import Job, jobs_at_once
from smartprune.sweep.job import environment as job_environment
from smartprune.train import train

OPTIONS = {name: value for name, value in SMALL.items() if name != "sparsity"}
CELL = "digits-resnet8-{}-4x2-{}-s{}"


def grid(**changes: Any) -> Grid:
    told: dict[str, Any] = {"methods": ("smart", "magnitude"), "sparsities": (0.5,), "options": OPTIONS, "settings": {}}
    return Grid(**{**told, **changes})


def arguments(out: Path, *more: str) -> list[str]:
    without = FLAGS[: FLAGS.index("--sparsity")]
    return ["sweep", *without, "--methods", "smart,magnitude", "--sparsities", "0.5", "--out", str(out), *more]


def starts(out: Path, name: str) -> list[str]:
    """The commands that were started for a run."""
    log = (out / "logs" / f"{name}.log").read_text()
    return [line for line in log.splitlines() if line.startswith("$ ")]


def wait_for(there: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_cells_come_in_order() -> None:
    cells = lay_out([grid(methods=("magnitude", "smart"), sparsities=(0.75, 0.5), seeds=(1, 0))])
    assert [cell.name for cell in cells] == [
        CELL.format(m, s, seed) for m in ("magnitude", "smart") for s in (0.75, 0.5) for seed in (1, 0)
    ]
    assert len({cell.dense for cell in cells}) == 2


def test_settings_belong_to_a_method_and_to_the_name() -> None:
    (cell, other) = lay_out([grid(settings={"smart": {"ramp": "cubic", "end": 1e-4}})])
    assert cell.name == "digits-resnet8-smart-ramp=cubic-end=0.0001-4x2-0.5-s0"
    assert cell.config.settings["ramp"] == "cubic"
    assert other.name == CELL.format("magnitude", 0.5, 0)
    with pytest.raises(SmartpruneError, match="settings for pdp, which is not among the methods"):
        lay_out([grid(settings={"pdp": {}})])
    with pytest.raises(SmartpruneError, match="comes twice with different options"):
        lay_out([grid(), grid(options={**OPTIONS, "search_epochs": 3})])
    assert len(lay_out([grid(), grid()])) == 2


def test_dense_models_are_shared_by_what_they_depend_on(tmp_path: Path) -> None:
    base = small(tmp_path)
    after: list[dict[str, Any]] = [{"method": "magnitude"}, {"sparsity": 0.9}, {"search_epochs": 9}, {"block": "8x4"}]
    before: list[dict[str, Any]] = [{"seed": 1}, {"dense_epochs": 3}, {"lr": 0.2}, {"task_settings": {"width": 5}}]
    assert {dense_name(small(tmp_path, **change)) for change in after} == {dense_name(base)}
    assert len({dense_name(small(tmp_path, **change)) for change in [{}, *before]}) == 5
    assert dense_name(dense_config(base, tmp_path / "d")) == dense_name(base)


def test_a_dense_model_that_is_given(tmp_path: Path) -> None:
    cells = lay_out([grid(options={**OPTIONS, "dense": "/models/s{seed}.safetensors"}, seeds=(0, 3))])
    assert [cell.config.dense for cell in cells[:2]] == ["/models/s0.safetensors", "/models/s3.safetensors"]
    assert all(cell.dense is None for cell in cells)


def test_grid_files(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    entry = {"methods": ["smart"], "seeds": [0, 1], "options": OPTIONS, "settings": {"smart": {"start": 2.0}}}
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": {**OPTIONS, "sparsity": 0}}]))
    with pytest.raises(SmartpruneError, match=r"grid.json: \[1\]: options has sparsity"):
        read_grids(path)
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": OPTIONS}]))
    names = [cell.name for cell in lay_out([g.under({"batch": 64}, {"smart": {"end": 0.01}}) for g in read_grids(path)])]
    assert len(names) == 3
    assert "start=2-end=0.01" in names[0]
    for text, message in (("[3]", "is a int"), ('{"method": []}', "unknown key 'method'"), ('{"seeds": 3}', "must be a list")):
        path.write_text(text)
        with pytest.raises(SmartpruneError, match=message):
            read_grids(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--jobs", "0"], "--jobs 0 should be at least 1"),
        (["--minutes", "0"], "--minutes 0 should be above 0"),
        (["--seeds", "a"], "--seeds a: write a list with commas"),
        (["--methods", "snip"], "unknown method 'snip'"),
        (["--set", "start=2"], "write METHOD.NAME=VALUE, such as smart.start=2"),
        (["--set", "smart.strat=2"], "unknown setting 'strat' for smart"),
        (["--set", "pdp.end=2"], "settings for pdp"),
        (["--sparsities", "93"], "sparsity=93"),
        (["--grid", "grid.json"], "--grid and --methods"),
        (["--macs", "0.5"], "--sparsities and --macs"),
        (["--sparsity", "0.5"], "unrecognized arguments: --sparsity"),
    ],
)
def test_bad_arguments(more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path / "out", *more))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    (cell, _) = lay_out([grid()])
    folder = cell.folder(tmp_path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(small(folder, lr=0.3))))
    with pytest.raises(SmartpruneError, match=r"was made with lr=0\.3, and 0\.1 is asked for now"):
        Sweep(tmp_path, [cell])


def test_no_time_for_another_run(tmp_path: Path) -> None:
    """One run is done and took longer than there is time: the next one is not started."""
    first, second = lay_out([grid()])
    folder = first.folder(tmp_path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(first.config)))
    result: dict[str, Any] = {
        "folder": "",
        "task": "digits",
        "model": "resnet8",
        "method": "smart",
        "measure": "accuracy",
        "dense": 1.0,
    }
    result |= {"pruned": 1.0, "verified": True, "seconds": 100.0, "stage_seconds": {}, "versions": {}}
    (folder / "result.json").write_text(json.dumps(result))
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / f"{first.dense}.safetensors").touch()
    sweep = Sweep(tmp_path, [first, second], minutes=1)
    outcome = sweep.run(Board(io.StringIO()), lambda: False)
    assert (outcome.done, outcome.missing, outcome.why) == ([first], [second], "time")
    assert not (tmp_path / "logs" / f"{second.name}.log").exists()
    second.folder(tmp_path).mkdir()
    (second.folder(tmp_path) / "metrics.jsonl").write_text('{"seconds": 90}\n')
    assert sweep._spent("run", second) == 90


def test_the_live_block() -> None:
    stream = io.StringIO()
    board = Board(stream, live=True)
    board.show(State(1, 4, 1, 75.0, [Line("smart-0.9-s0", "search 3/9", 5.0)]))
    board.say("done")
    board.close()
    text = stream.getvalue()
    assert "sweep  1/4 done, 1 running, 1 failed, about 1:15 left\n  smart-0.9-s0   0:05  search 3/9\n" in text
    assert text.endswith("\x1b[2A\x1b[Jdone\n")


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs_at_once(["cuda"]) == 1
    assert jobs_at_once(["cpu"]) >= 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert job_environment(1000)["OMP_NUM_THREADS"] == "1"


def test_killed_and_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep is killed, and one of its two runs with it: the other is waited for, the dead one resumed."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    train(small(alone, search_epochs=60))
    words = arguments(out, "--jobs", "2", "--search-epochs", "60", "--checkpoint-seconds", "0.2")
    words += ["--dense", str(alone / "dense.safetensors")]
    smart, magnitude = (CELL.format(method, 0.5, 0) for method in ("smart", "magnitude"))
    pipe = subprocess.PIPE
    sweep = subprocess.Popen(command(*words), env=environment(), text=True, stdout=pipe, stderr=pipe)
    wait_for(lambda: all((out / name / "checkpoint.pt").exists() for name in (smart, magnitude)), sweep)
    sweep.kill()
    sweep.communicate()
    log = (out / "logs" / f"{smart}.log").read_text()
    owner = next(line for line in log.splitlines() if line.startswith("# process"))
    os.kill(int(owner.split()[-2]), signal.SIGKILL)
    assert not (out / smart / "result.json").exists()
    assert main(words) == 0
    assert len(starts(out, smart)) == 2
    assert "--resume" in starts(out, smart)[1]
    assert len(starts(out, magnitude)) == 1
    assert capsys.readouterr().out.startswith("digits(width=4), resnet8, blocks of 4x2")
    assert noted(out)["commands"] == [shlex.join(["smartprune", *words])]
    kept = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    (alone / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept if row["stage"] != "dense"))
    assert_same_run(out / smart, alone)
    assert main(words) == 0
    assert len(starts(out, smart)) == 2
    assert "2 of 2 runs are done already" in capsys.readouterr().err


def test_a_failed_run_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense model is that of a run of its own; a damaged run is told at the end, with its log."""
    out = tmp_path / "out"
    train(small(tmp_path / "plain", search_epochs=1))
    smart, magnitude = lay_out([grid(options={**OPTIONS, "search_epochs": 1})])
    folder = smart.folder(out)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(smart.config) | {"out": str(folder)}))
    (folder / "checkpoint.pt").write_bytes(b"nonsense")
    assert main(arguments(out, "--search-epochs", "1", "--jobs", "1")) == 1
    captured = capsys.readouterr()
    assert f"{smart.name} failed with exit code 1; the end of {out / 'logs' / smart.name}.log:" in captured.err
    assert "checkpoint.pt is damaged" in captured.err
    assert "1 runs done, 1 failed; the same command goes on from here" in captured.err
    assert "magnitude" in captured.out
    dense = out / "dense" / f"{magnitude.dense}.safetensors"
    assert dense.read_bytes() == (tmp_path / "plain" / "dense.safetensors").read_bytes()
    assert list((out / "dense").iterdir()) == [dense]


def test_stopped_at_the_limit_with_a_checkpoint(tmp_path: Path) -> None:
    """An orphan of a sweep that is gone is stopped too."""
    (cell,) = lay_out([grid(methods=("magnitude",), options={**OPTIONS, "search_epochs": 5000, "checkpoint_seconds": 0.2})])
    out, name = tmp_path, cell.name
    (out / "logs").mkdir()
    (out / "dense").mkdir()
    (out / "logs" / "c.json").write_text(json.dumps(asdict(cell.config) | {"out": ""}))
    words = ["train", "--config", str(out / "logs" / "c.json"), "--out", str(out / name)]
    job = Job(name, "run", out / name, out / "logs" / f"{name}.log", words, 1)
    log = out / "logs" / f"{name}.log"
    text = log.read_text()
    log.write_text(text.replace(f" {os.getpid()}\n", " 999999999\n"))  # as if the sweep that started it was gone
    assert job.process is not None
    while not (out / name / "checkpoint.pt").exists():
        assert job.poll() is None, job.last_lines()
        time.sleep(0.05)
    sweep = Sweep(out, [cell], jobs=1, minutes=0.01)
    (out / "dense" / f"{cell.dense}.safetensors").touch()
    outcome = sweep.run(Board(io.StringIO()), lambda: False)
    assert (outcome.why, outcome.missing, outcome.failed) == ("time", [cell], [])
    assert job.process.wait(30) == 1
    assert "stopped in" in job.last_lines()[-1]
    assert (out / name / "checkpoint.pt").exists()
    assert not job.adopted
