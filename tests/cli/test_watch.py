"""Following a run from outside: what is read while it is being written, and what is shown where."""

import io
import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import training_jobs
from smartprune.cli import main
from smartprune.reports.runlog import read_rows
from smartprune.training import monitor

CONFIG = {
    "model": "resnet8",
    "task": "digits",
    "method": "smart",
    "dense": None,
    "dense_epochs": 2,
    "search_epochs": 3,
    "finetune_epochs": 1,
}


def row(stage: str, epoch: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "epoch": epoch, "step": 10 * epoch, "loss": 1 / epoch, "accuracy": None, "seconds": seconds, **more}


ROWS = [
    row("dense", 1, 1.0, accuracy=0.5),
    row("dense", 2, 2.0, accuracy=0.75),
    row("search", 1, 5.0, tau=0.1, undecided=100, changed=3),
    row("search", 2, 8.0, tau=0.01, undecided=7, changed=1),
]


def folder(path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return path


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    whole = json.dumps(ROWS[3])
    for cut in range(len(whole)):
        folder(tmp_path / "run", ROWS[:3], whole[:cut])
        assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 3
    folder(tmp_path / "run", ROWS[:3], whole)
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 4
    assert read_rows(tmp_path / "absent") == []


def test_time_left_by_hand(tmp_path: Path) -> None:
    found = monitor.read_snapshot(folder(tmp_path / "run", ROWS))
    # the search takes 0.3 s a step and has 10 steps left; fine-tuning, of 10 steps, is taken to be as slow
    assert found.seconds_left == pytest.approx(10 * 0.3 + 10 * 0.3)
    one = monitor.read_snapshot(folder(tmp_path / "run", ROWS[:3]))
    assert one.seconds_left == pytest.approx(20 * 0.1 + 10 * 0.1)  # only the pace of the dense stage is known
    assert monitor.read_snapshot(folder(tmp_path / "run", [])).seconds_left is None
    assert monitor.read_snapshot(folder(tmp_path / "run", ROWS[:1])).seconds_left is None


def test_what_is_shown(tmp_path: Path) -> None:
    found = monitor.read_snapshot(folder(tmp_path / "run", ROWS))
    shown = monitor.status_lines(found, ascii_only=True)
    assert shown[1:] == [
        "dense       ########################      20/20",
        "search      ################........      20/30",
        "fine-tuning ........................       0/10",
        "now         search, epoch 2, step 20",
        "loss              0.5000  #_#_",
        "accuracy          75.00%  _#",
        "tau             1.00e-02  #_",
        "undecided              7  #_",
        "churn                  1  #_",
        "time left   0:06, if later stages run at the same pace",
    ]
    assert "█" in "".join(monitor.status_lines(found, ascii_only=False))
    assert max(map(len, monitor.status_lines(found, True, width=40))) <= 40
    assert monitor.status_lines(monitor.read_snapshot(folder(tmp_path / "run", [])), True)[1] == "no epoch has finished yet"


def test_a_run_that_went_quiet_says_so(tmp_path: Path) -> None:
    found = monitor.read_snapshot(folder(tmp_path / "run", ROWS))
    assert not any(line.startswith("stalled") for line in monitor.status_lines(found, True))
    late = monitor.Snapshot(found.log, age=1000.0)
    assert monitor.status_lines(late, True)[-1].startswith("stalled     no new output for 16:40")
    assert "may have stopped" not in monitor.status_line(found)
    assert monitor.status_line(late).endswith("undecided 7  no new output; the run may have stopped")
    later = monitor.Snapshot(found.log, age=2000.0)
    assert monitor.status_line(later) == monitor.status_line(late)  # a log has it once
    none = monitor.Snapshot(monitor.read_snapshot(folder(tmp_path / "run", [])).log, age=1000.0)
    assert monitor.status_line(none).startswith("no epoch has finished yet  no new output")


def test_sparks() -> None:
    assert monitor.sparkline([], True) == ""
    assert monitor.sparkline([5, 5, 5], True) == "___"
    assert len(monitor.sparkline(list(range(1000)), False)) == monitor.POINTS
    assert monitor.sparkline([1e-6, 1e-3, 1.0], True, log=True) == "_=#"
    assert monitor.sparkline([0.0], True, log=True) == ""


class Changes:
    """A run that goes on while it is watched: each sleep makes the next thing happen."""

    def __init__(self, *changes: Any) -> None:
        self.changes = list(changes)

    def __call__(self, seconds: float) -> None:
        assert seconds == 0.5
        self.changes.pop(0)()


def test_it_follows_to_the_end_through_a_resume(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [])

    def end() -> None:
        (run / "result.json").write_text(json.dumps({"measure": "accuracy", "dense": 0.8, "pruned": 0.7, "seconds": 9.0}))

    sleep = Changes(
        lambda: folder(run, ROWS),
        lambda: None,
        lambda: folder(run, ROWS[:2]),  # cut back to the checkpoint by a resume
        lambda: folder(run, [*ROWS, row("finetune", 1, 9.0, accuracy=0.7)]),
        end,
    )
    stream = io.StringIO()
    found = monitor.follow(run, 0.5, stream, live=False, sleep=sleep)
    assert found.finished
    assert not sleep.changes
    said = stream.getvalue().splitlines()
    assert [line.split()[0] for line in said] == ["no", "search", "dense", "fine-tuning", "fine-tuning"]
    assert said[1].split("  ", 1)[1].strip() == "epoch    2  step     20/30  loss 0.5000  tau 1.00e-02  undecided 7  0:06 left"
    assert said[-1].endswith("finished: accuracy 70.00%")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().isascii()


def test_on_a_terminal_it_stays_in_its_place(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", ROWS)
    stream = io.StringIO()

    def end() -> None:
        (run / "result.json").write_text("{}")

    monitor.follow(run, 0.5, stream, live=True, sleep=Changes(lambda: None, end))
    parts = stream.getvalue().split("\x1b[J")
    first = parts[0].count("\n")
    assert parts[1].startswith(f"\x1b[{first}F")
    assert all(line.startswith(("\x1b[2K", "\x1b[")) for part in parts for line in part.splitlines())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path / "run", ROWS)
    assert main(["watch", str(run), "--once"]) == 0
    assert "now         search, epoch 2, step 20" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "absent"), "--once"]) == 1
    assert "holds no run (no config.json); add --wait" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(run), "--every", "0"])
    (run / "result.json").write_text("{}")
    assert main(["watch", str(run)]) == 0


def test_it_waits_for_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        time.sleep(0.3)
        run = folder(tmp_path / "later", ROWS)
        (run / "result.json").write_text("{}")

    thread = threading.Thread(target=begin)
    thread.start()
    assert main(["watch", str(tmp_path / "later"), "--wait", "--every", "0.05"]) == 0
    thread.join()
    assert "waiting for" in capsys.readouterr().err


def test_control_c_ends_it_well(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", ROWS)
    words = training_jobs.command("watch", str(run), "--every", "0.05")
    process = subprocess.Popen(words, env=training_jobs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("search")
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error.strip()) == (0, "", "")


def test_a_real_run_is_followed_while_it_trains(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    run = tmp_path / "run"
    environment = training_jobs.environment()
    watcher = subprocess.Popen(
        training_jobs.command("watch", str(run), "--wait", "--every", "0.05"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = subprocess.run(
        training_jobs.command("train", "--out", str(run), *training_jobs.SMALL_FLAGS),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    out, error = watcher.communicate(timeout=30)
    assert watcher.returncode == 0, error
    assert "finished: accuracy" in out.splitlines()[-1]
