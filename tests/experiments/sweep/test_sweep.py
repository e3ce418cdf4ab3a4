"""Running a grid: resuming after a kill, time limits and failures."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from helpers.sweeps import CELL, OPTIONS, finish, small_grid, sweep_arguments, write_record
from helpers.training_jobs import assert_same_run, command, environment, small_config
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.sweep import Sweep
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.experiments.sweep.history import read_history
from smartprune.experiments.sweep.job import OWNER, Job
from smartprune.experiments.sweep.progress import SweepProgress
from smartprune.training.train import train


def starts(out: Path, name: str) -> list[str]:
    """The commands that were started for a run."""
    log = (out / "logs" / f"{name}.log").read_text()
    return [line for line in log.splitlines() if line.startswith("$ ")]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_folder_with_other_settings_raises(tmp_path: Path) -> None:
    (cell, _) = expand_grids([small_grid()])
    folder = cell.folder(tmp_path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(asdict(small_config(folder, lr=0.3))))
    with pytest.raises(SmartpruneError, match=r"was made with lr=0\.3, but 0\.1 is requested now"):
        Sweep(tmp_path, [cell])


def test_a_failed_dense_model_fails_the_cells_that_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = expand_grids([small_grid()])
    work = tmp_path / "out" / "dense" / f".{cells[0].dense}"
    work.mkdir(parents=True)
    (work / "config.json").write_text(json.dumps(asdict(cells[0].dense_config(work))))
    (work / "checkpoint.pt").write_bytes(b"nonsense")
    assert main(sweep_arguments(tmp_path / "out", "--jobs", "1")) == 1
    captured = capsys.readouterr().err
    assert f"{cells[0].dense} failed with exit code 1" in captured
    assert all(f"{cell.name} failed with exit code 1" in captured for cell in cells)
    assert "0 runs done, 2 failed; repeat the same command to continue" in captured


@pytest.mark.parametrize("going", [False, True])
def test_left_over_dense_runs_of_a_killed_sweep_are_ended(going: bool, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    cells = expand_grids([small_grid()])
    for cell in cells:
        finish(tmp_path, cell)
    name = str(cells[0].dense)
    work, log = tmp_path / "dense" / f".{name}", tmp_path / "logs" / f"{name}.log"
    work.mkdir(parents=True)
    (work / "dense.safetensors").write_bytes(b"whole")
    log.parent.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with log.open("wb") as file:  # the child inherits the lock
        fcntl.flock(file, fcntl.LOCK_EX)
        left = subprocess.Popen(["sleep", "100" if going else "0"], stdout=file)
        file.write(f"{OWNER} {left.pid} {gone.pid}\n".encode())
    if not going:
        left.wait()
    threading.Thread(target=left.wait, daemon=True).start()  # as init does for orphans
    sweep = Sweep(tmp_path, cells)
    assert not sweep.run(SweepProgress(io.StringIO()), lambda: False).missing
    assert left.wait(10) == (-signal.SIGTERM if going else 0)
    assert (sweep.dense_models.path(name).read_bytes(), work.exists(), any(kind == "dense" for kind, _ in sweep.durations)) == (
        b"whole",
        False,
        False,
    )


def test_a_run_that_would_not_finish_in_time_is_not_started(tmp_path: Path) -> None:
    """The finished run took longer than the time that is left."""
    first, second = expand_grids([small_grid()])
    finish(tmp_path, first)
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / f"{first.dense}.safetensors").touch()
    sweep = Sweep(tmp_path, [first, second], minutes=1.7)  # 100 s do not fit into it with its time for checkpoints
    outcome = sweep.run(SweepProgress(io.StringIO()), lambda: False)
    assert (outcome.done, outcome.missing, outcome.reason) == ([first], [second], "time")
    assert not (tmp_path / "logs" / f"{second.name}.log").exists()
    second.folder(tmp_path).mkdir()
    (second.folder(tmp_path) / "metrics.jsonl").write_text('{"seconds": 90}\n')
    assert sweep.seconds_spent("run", second) == 90


def test_shorter_runs_start_where_the_next_one_would_not_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are longer than the whole limit start too, because they have to be resumed in any case."""
    long, short = {**OPTIONS, "search_epochs": 60}, {**OPTIONS, "search_epochs": 2}
    grids = [small_grid(methods=(method,), options=options) for options in (long, short) for method in ("smart", "magnitude")]
    cells = expand_grids([replace(grid, label="abcd"[number]) for number, grid in enumerate(grids)])
    finish(tmp_path, cells[0])
    finish(tmp_path, cells[2])
    (tmp_path / cells[2].name / "result.json").write_text(
        (tmp_path / cells[2].name / "result.json").read_text().replace('"seconds": 100.0', '"seconds": 1.0')
    )
    started: list[str] = []

    class StartedError(Exception):
        pass

    def start(name: str, *arguments: object) -> None:
        started.append(name)
        raise StartedError

    monkeypatch.setattr("smartprune.experiments.sweep.sweep.Job", start)
    for minutes, expected in ((1.7, cells[3].name), (1.5, cells[1].name)):
        (tmp_path / "dense").mkdir(exist_ok=True)
        (tmp_path / "dense" / f"{cells[0].dense}.safetensors").touch()
        sweep = Sweep(tmp_path, cells, 1, minutes)
        with pytest.raises(StartedError):
            sweep.run(SweepProgress(io.StringIO()), lambda: False)
        assert started.pop() == expected


def test_cells_that_differ_in_their_seeds_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, seen = expand_grids([small_grid(methods=("smart", "magnitude", "gradual"), seeds=(0, 1, 2))]), []
    for cell in cells[:3]:
        finish(tmp_path, cell)
    monkeypatch.setattr("smartprune.experiments.sweep.sweep.check", lambda config: seen.append(config.method))
    Sweep(tmp_path, cells).check()
    assert seen == ["magnitude", "gradual"]


def test_an_unreadable_result_does_not_stop_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for results from before the sweep and for results of its own runs."""
    cells = expand_grids([small_grid()])
    for cell in cells:
        finish(tmp_path, cell)
    path = cells[0].folder(tmp_path) / "result.json"
    path.write_text('{"folder": 3}')
    assert main(sweep_arguments(tmp_path)) == 1
    captured = capsys.readouterr()
    assert f"{path}: " in captured.err
    assert "Delete result.json and finish the run again" in captured.err
    assert "1 runs done, 1 failed" in captured.err

    class Ended:
        kind, folder, adopted, seconds, name = "run", cells[0].folder(tmp_path), False, 1.0, cells[0].name

        def poll(self) -> int:
            return 0

    sweep, shown = Sweep(tmp_path, cells), io.StringIO()
    sweep.running[cells[0].name] = Ended()  # type: ignore[assignment]
    sweep.collect_finished(SweepProgress(shown))
    assert list(sweep.failed) == [cells[0].name]
    assert "FAILED: its result.json cannot be read" in shown.getvalue()


def test_a_killed_sweep_resumes_and_runs_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep and one of its two runs are killed. The new sweep resumes that run and waits for the other."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    train(small_config(alone, search_epochs=60))
    words = sweep_arguments(out, "--jobs", "2", "--search-epochs", "60", "--checkpoint-seconds", "0.2")
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
    assert read_history(out)["commands"] == [shlex.join(["smartprune", *words])]
    kept = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    (alone / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept if row["stage"] != "dense"))
    assert_same_run(out / smart, alone)
    assert main(words) == 0
    assert len(starts(out, smart)) == 2
    assert "2 of 2 runs are done already" in capsys.readouterr().err


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense model comes from a run with another seed. The damaged run is reported at the end, with its log. Recorded
    cells are not run."""
    out = tmp_path / "out"
    train(small_config(tmp_path / "plain", search_epochs=1))
    methods = ("smart", "magnitude", "gradual")
    smart, magnitude, gradual = expand_grids(
        [small_grid(methods=methods, seeds=(1,), options={**OPTIONS, "search_epochs": 1}, dense_seed=0)]
    )
    finish(tmp_path / "runs", gradual)
    records = write_record(tmp_path / "records", tmp_path / "runs")
    folder = smart.folder(out)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(smart.config) | {"out": str(folder)}))
    (folder / "checkpoint.pt").write_bytes(b"nonsense")
    more = ["--methods", ",".join(methods), "--seeds", "1", "--dense-seed", "0", "--recorded", str(records)]
    assert main(sweep_arguments(out, "--search-epochs", "1", "--jobs", "1", *more)) == 1
    captured = capsys.readouterr()
    assert "1 of 3 cells are recorded already" in captured.err
    assert f"{smart.name} failed with exit code 1; the end of {out / 'logs' / smart.name}.log:" in captured.err
    assert "checkpoint.pt is damaged" in captured.err
    assert "1 runs done, 1 failed; repeat the same command to continue" in captured.err
    assert "magnitude" in captured.out
    dense = out / "dense" / f"{magnitude.dense}.safetensors"
    assert dense.read_bytes() == (tmp_path / "plain" / "dense.safetensors").read_bytes()
    assert list((out / "dense").iterdir()) == [dense]
    values = json.loads((magnitude.folder(out) / "config.json").read_text())
    assert (values["seed"], values["dense"]) == (1, str(dense))
    assert not gradual.folder(out).exists()


def test_a_healthy_sweep_ends_every_run_normally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process of the dense model ends by itself, and no line of its log says that it was stopped."""
    out = tmp_path / "out"
    (cell, *_) = expand_grids([small_grid()])
    assert main(sweep_arguments(out, "--jobs", "1", "--dense-parts", str(tmp_path / "parts"))) == 0
    captured = capsys.readouterr()
    (part,) = (tmp_path / "parts").iterdir()
    assert part.name.startswith(f"{cell.dense}.")
    assert part.read_bytes() == (out / "dense" / f"{cell.dense}.safetensors").read_bytes()
    log = (out / "logs" / f"{cell.dense}.log").read_text()
    assert "--dense-only" in log
    assert "the dense model is in" in log
    for text in (captured.out, captured.err, *(path.read_text() for path in (out / "logs").glob("*.log"))):
        assert "stop" not in text


def test_the_time_limit_stops_orphans_with_a_checkpoint(tmp_path: Path) -> None:
    """The sweep that started the run no longer exists."""
    (cell,) = expand_grids(
        [small_grid(methods=("magnitude",), options={**OPTIONS, "search_epochs": 5000, "checkpoint_seconds": 0.2})]
    )
    out, name = tmp_path, cell.name
    (out / "logs").mkdir()
    (out / "dense").mkdir()
    (out / "logs" / "c.json").write_text(json.dumps(asdict(cell.config) | {"out": ""}))
    words = ["train", "--config", str(out / "logs" / "c.json"), "--out", str(out / name)]
    job = Job(name, "run", out / name, out / "logs" / f"{name}.log", words, 1)
    log = out / "logs" / f"{name}.log"
    text = log.read_text()
    log.write_text(text.replace(f" {os.getpid()}\n", " 999999999\n"))  # a sweep that no longer exists
    assert job.process is not None
    while not (out / name / "checkpoint.pt").exists():
        assert job.poll() is None, job.last_lines()
        time.sleep(0.05)
    sweep = Sweep(out, [cell], jobs=1, minutes=0.01)
    (out / "dense" / f"{cell.dense}.safetensors").touch()
    outcome = sweep.run(SweepProgress(io.StringIO()), lambda: False)
    assert (outcome.reason, outcome.missing, outcome.failed) == ("time", [cell], [])
    assert job.process.wait(30) == 1
    assert "stopped in" in job.last_lines()[-1]
    assert (out / name / "checkpoint.pt").exists()
    assert not job.adopted
