"""Monitoring a run: what is read while it is written, and what is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.monitored_runs import ROWS, metric_row, write_run_folder
from smartprune.reports.runlog import read_rows
from smartprune.training import monitor


def test_incomplete_row_is_not_read(tmp_path: Path) -> None:
    whole = json.dumps(ROWS[3])
    for cut in range(len(whole)):
        write_run_folder(tmp_path / "run", ROWS[:3], whole[:cut])
        assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 3
    write_run_folder(tmp_path / "run", ROWS[:3], whole)
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 4
    assert read_rows(tmp_path / "absent") == []


def test_time_left_matches_a_hand_calculation(tmp_path: Path) -> None:
    snapshot = monitor.read_snapshot(write_run_folder(tmp_path / "run", ROWS))
    # the search takes 0.3 s a step and has 10 steps left; fine-tuning, of 10 steps, is taken to be as slow
    assert snapshot.seconds_left == pytest.approx(10 * 0.3 + 10 * 0.3)
    one = monitor.read_snapshot(write_run_folder(tmp_path / "run", ROWS[:3]))
    assert one.seconds_left == pytest.approx(20 * 0.1 + 10 * 0.1)  # only the pace of the dense stage is known
    assert monitor.read_snapshot(write_run_folder(tmp_path / "run", [])).seconds_left is None
    assert monitor.read_snapshot(write_run_folder(tmp_path / "run", ROWS[:1])).seconds_left is None


def test_status_lines(tmp_path: Path) -> None:
    snapshot = monitor.read_snapshot(write_run_folder(tmp_path / "run", ROWS))
    shown = monitor.status_lines(snapshot, ascii_only=True)
    assert shown[1:] == [
        "dense        ########################      20/20",
        "search       ################........      20/30",
        "fine-tuning  ........................       0/10",
        "now          search, epoch 2, step 20",
        "loss               0.5000  #_#_",
        "val accuracy       75.00%  _#",
        "tau              1.00e-02  #_",
        "undecided               7  #_",
        "churn                   1  #_",
        "time left    0:06, if later stages run at the same pace",
    ]
    assert "█" in "".join(monitor.status_lines(snapshot, ascii_only=False))
    assert max(map(len, monitor.status_lines(snapshot, True, width=40))) <= 40
    assert (
        monitor.status_lines(monitor.read_snapshot(write_run_folder(tmp_path / "run", [])), True)[1] == "no epoch has finished yet"
    )


def test_a_hard_mask_has_no_temperature(tmp_path: Path) -> None:
    rows = [*ROWS[:2], metric_row("search", 3, 9.0, tau=0.0, undecided=0)]
    snapshot = monitor.read_snapshot(write_run_folder(tmp_path / "run", rows))
    assert "tau" not in monitor.status_line(snapshot)
    (line,) = [line for line in monitor.status_lines(snapshot, True) if line.startswith("tau")]
    assert "hard mask" in line
    assert "0.00e+00" not in line


def test_stalled_run_is_marked(tmp_path: Path) -> None:
    snapshot = monitor.read_snapshot(write_run_folder(tmp_path / "run", ROWS))
    assert not any(line.startswith("stalled") for line in monitor.status_lines(snapshot, True))
    late = monitor.Snapshot(snapshot.log, age=1000.0)
    assert monitor.status_lines(late, True)[-1].startswith("stalled      no new output for 16:40")
    assert "may have stopped" not in monitor.status_line(snapshot)
    assert monitor.status_line(late).endswith("undecided 7  no new output; the run may have stopped")
    later = monitor.Snapshot(snapshot.log, age=2000.0)
    assert monitor.status_line(later) == monitor.status_line(late)  # a log has it once
    none = monitor.Snapshot(monitor.read_snapshot(write_run_folder(tmp_path / "run", [])).log, age=1000.0)
    assert monitor.status_line(none).startswith("no epoch has finished yet  no new output")


def test_sparkline() -> None:
    assert monitor.sparkline([], True) == ""
    assert monitor.sparkline([5, 5, 5], True) == "___"
    assert len(monitor.sparkline(list(range(1000)), False)) == monitor.POINTS
    assert monitor.sparkline([1e-6, 1e-3, 1.0], True, log=True) == "_=#"
    assert monitor.sparkline([0.0], True, log=True) == ""


class Changes:
    """A run that continues while it is watched: each sleep makes the next change."""

    def __init__(self, *changes: Any) -> None:
        self.changes = list(changes)

    def __call__(self, seconds: float) -> None:
        assert seconds == 0.5
        self.changes.pop(0)()


def test_follow_continues_through_a_resume_to_the_end(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", [])

    def end() -> None:
        (run / "result.json").write_text(json.dumps({"measure": "accuracy", "dense": 0.8, "pruned": 0.7, "seconds": 9.0}))

    sleep = Changes(
        lambda: write_run_folder(run, ROWS),
        lambda: None,
        lambda: write_run_folder(run, ROWS[:2]),  # cut back to the checkpoint by a resume
        lambda: write_run_folder(run, [*ROWS, metric_row("finetune", 1, 9.0, accuracy=0.7)]),
        end,
    )
    stream = io.StringIO()
    snapshot = monitor.follow(run, 0.5, stream, live=False, sleep=sleep)
    assert snapshot.finished
    assert not sleep.changes
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["no", "search", "dense", "fine-tuning", "fine-tuning"]
    assert lines[1].split("  ", 1)[1].strip() == "epoch    2  step     20/30  loss 0.5000  tau 1.00e-02  undecided 7  0:06 left"
    assert lines[-1].endswith("finished: test accuracy 70.00%")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().isascii()


def test_follow_updates_in_place_on_a_terminal(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", ROWS)
    stream = io.StringIO()

    def end() -> None:
        (run / "result.json").write_text("{}")

    monitor.follow(run, 0.5, stream, live=True, sleep=Changes(lambda: None, end))
    parts = stream.getvalue().split("\x1b[J")
    first = parts[0].count("\n")
    assert parts[1].startswith(f"\x1b[{first}F")
    assert all(line.startswith(("\x1b[2K", "\x1b[")) for part in parts for line in part.splitlines())
