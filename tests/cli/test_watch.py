"""``smartprune watch``: its options, waiting, and following a real run."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from helpers import training_jobs
from helpers.monitored_runs import ROWS, write_run_folder
from smartprune.cli import main


def test_watch_shows_a_run_once_or_until_it_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run_folder(tmp_path / "run", ROWS)
    assert main(["watch", str(run), "--once"]) == 0
    assert "now          search, epoch 2, step 20" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "absent"), "--once"]) == 1
    assert "holds no run (no config.json); add --wait" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(run), "--every", "0"])
    (run / "result.json").write_text("{}")
    assert main(["watch", str(run)]) == 0


def test_wait_waits_for_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        time.sleep(0.3)
        run = write_run_folder(tmp_path / "later", ROWS)
        (run / "result.json").write_text("{}")

    thread = threading.Thread(target=begin)
    thread.start()
    assert main(["watch", str(tmp_path / "later"), "--wait", "--every", "0.05"]) == 0
    thread.join()
    assert "waiting for" in capsys.readouterr().err


def test_ctrl_c_exits_with_success(tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "run", ROWS)
    words = training_jobs.command("watch", str(run), "--every", "0.05")
    process = subprocess.Popen(
        words,
        env=training_jobs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it in jobs that run in the background
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("search")
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error.strip()) == (0, "", "")


def test_watch_follows_a_run_to_its_end(tmp_path: Path) -> None:
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
    assert "finished: test accuracy" in out.splitlines()[-1]
