"""Resuming is bit-exact after stops, signals and kills."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from helpers.training_jobs import (
    ALL_OPTIONS,
    SMALL_FLAGS,
    StopAfter,
    assert_same_run,
    command,
    environment,
    metric_rows,
    small_config,
    stopped_run,
)
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.training.result import Result
from smartprune.training.train import resume, train


def start_process(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("train", *arguments),
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> bool:
    for _ in range(6000):
        if path.exists():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.parametrize("every", [1, 3, 7, 11])
def test_resume_after_stops_is_bit_exact(every: int, finished_run: Path, tmp_path: Path) -> None:
    """35 steps: 14 dense, 14 of search, 7 of fine-tuning; the stops fall into, onto and between epochs and stages."""
    out, stops = tmp_path / "run", 1
    with pytest.raises(SmartpruneError, match=r"stopped in dense, after step .*; continue with: smartprune train --resume"):
        train(small_config(out), stop=StopAfter(every))
    while not (out / "result.json").exists():
        torch.rand(1)
        with suppress(SmartpruneError):
            resume(out, stop=StopAfter(every))
        stops += 1
    assert stops == 35 // every + 1
    assert_same_run(finished_run, out)


@pytest.mark.parametrize("every", [1, 3, 5])
def test_resume_with_all_options_is_bit_exact(every: int, run_with_all_options: Path, tmp_path: Path) -> None:
    """20 steps of four batches or two: the stops fall into, onto and between epochs and stages."""
    out, stops = tmp_path / "run", 1
    with pytest.raises(SmartpruneError, match="stopped in dense"):
        train(small_config(out, **ALL_OPTIONS), stop=StopAfter(every))
    while not (out / "result.json").exists():
        torch.rand(1)
        with suppress(SmartpruneError):
            resume(out, stop=StopAfter(every))
        stops += 1
    assert stops == 20 // every + 1
    assert_same_run(run_with_all_options, out)


@pytest.mark.slow
def test_resume_after_sigkill_at_random_moments_is_bit_exact(tmp_path: Path) -> None:
    flags = [*SMALL_FLAGS, "--dense-epochs", "6", "--search-epochs", "8", "--finetune-epochs", "6"]
    longer = {"dense_epochs": 6, "search_epochs": 8, "finetune_epochs": 6}
    train(small_config(tmp_path / "whole", **longer))
    moments, out, kills = random.Random(4), tmp_path / "run", 0
    arguments = [*flags, "--checkpoint-seconds", "0", "--out", str(out)]
    for _ in range(6):
        process = start_process(*arguments, folder=tmp_path)
        steps_before = (out / "checkpoint.pt").stat().st_mtime_ns if (out / "checkpoint.pt").exists() else None
        wait_for(out / "config.json", process)
        while process.poll() is None and steps_before is not None:  # until it works on from the checkpoint
            if (out / "checkpoint.pt").stat().st_mtime_ns != steps_before:
                break
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        arguments = ["--resume", "--out", str(out)]
        if (out / "result.json").exists():
            break
    assert kills >= 3
    last = start_process("--resume", "--out", str(out), folder=tmp_path)
    _, errors = last.communicate(timeout=100)
    assert last.returncode == 0, errors
    assert_same_run(tmp_path / "whole", out)
    assert not list(out.glob(".*"))


def test_resume_after_sigkill_with_all_options_is_bit_exact(run_with_all_options: Path, tmp_path: Path) -> None:
    import subprocess

    flags = [word for name, value in ALL_OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out, arguments, kills = tmp_path / "run", [*SMALL_FLAGS, *flags, "--checkpoint-seconds", "0", "--out", str(tmp_path / "run")], 0
    for moment in (0.0, 0.25):
        process = subprocess.Popen(command("train", *arguments), env=environment(), stderr=subprocess.PIPE)
        before = (out / "checkpoint.pt").stat().st_mtime_ns if (out / "checkpoint.pt").exists() else None
        while process.poll() is None:  # until it works on from the checkpoint
            if (out / "checkpoint.pt").exists() and (out / "checkpoint.pt").stat().st_mtime_ns != before:
                break
            time.sleep(0.002)
        time.sleep(moment)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        arguments = ["--resume", "--out", str(out)]
    assert kills >= 1
    resume(out)
    assert_same_run(run_with_all_options, out)


ENDLESS = ["--dense-epochs", "100000", "--checkpoint-seconds", "1000"]


def test_sigterm_writes_a_checkpoint_and_says_how_to_continue(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start_process(*SMALL_FLAGS, *ENDLESS, "--out", str(out), folder=tmp_path)
    assert wait_for(out / "metrics.jsonl", process)
    while not metric_rows(out):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output == ""
    assert f"continue with: smartprune train --resume --out {out}" in errors
    assert "Traceback" not in errors
    assert (out / "checkpoint.pt").exists()


def test_ctrl_c_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"

    def press() -> None:
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    assert main(["train", *SMALL_FLAGS, *ENDLESS, "--out", str(out)]) == 1
    thread.join()
    assert "stopping: writing a checkpoint" in capsys.readouterr().err
    assert (out / "checkpoint.pt").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_rows_after_the_checkpoint_are_written_once(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SmartpruneError):
        train(small_config(out), stop=StopAfter(10))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "dense", "epoch": 2}\n{"half a r')
    (out / ".checkpoint.pt.abc.part").write_bytes(b"half")
    resume(out)
    assert_same_run(finished_run, out)
    assert not list(out.glob(".*"))


def test_resume_after_a_kill_while_finishing_is_bit_exact(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import smartprune.training.train

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(smartprune.training.train, "verify", die)
        with pytest.raises(KeyboardInterrupt):
            train(small_config(out))
    assert not (out / "result.json").exists()
    resume(out)
    assert_same_run(finished_run, out)


def test_resume_commands_in_messages_are_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "it's a run"
    with pytest.raises(SmartpruneError, match="continue with: ") as stopped:
        train(small_config(folder), stop=lambda: True)
    with pytest.raises(SmartpruneError, match="continue it with: ") as held:
        train(small_config(folder))
    for message in (str(stopped.value), str(held.value).partition(", or choose")[0]):
        assert shlex.split(message.partition("with: ")[2]) == ["smartprune", "train", "--resume", "--out", str(folder)]


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=r"holds no run \(no config.json\); start one without --resume"):
        resume(tmp_path)


def test_resume_without_a_checkpoint_restarts(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SmartpruneError):
        train(small_config(out), stop=StopAfter(1))
    (out / "checkpoint.pt").unlink()
    resume(out)
    assert_same_run(finished_run, out)


@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("sparsity", 0.61), ("settings", {"reach": 2.0})])
def test_an_edited_configuration_is_refused(name: str, value: object, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SmartpruneError):
        train(small_config(out, checkpoint_seconds=0), stop=StopAfter(3))
    config = json.loads((out / "config.json").read_text())
    changed = config | {name: {**config[name], **value} if isinstance(value, dict) else value}
    (out / "config.json").write_text(json.dumps(changed))
    with pytest.raises(SmartpruneError, match=rf"config\.json was changed after the run began: {name}=.*\(was .*restore these"):
        resume(out)
    (out / "config.json").write_text(json.dumps(config | {"checkpoint_seconds": 60, "out": "elsewhere", "onnx": "off"}))
    resume(out)


def test_resuming_a_finished_run_changes_nothing(finished_run: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in finished_run.iterdir()}
    assert resume(finished_run) == Result.load(finished_run)
    assert {path.name: path.stat().st_mtime_ns for path in finished_run.iterdir()} == before


def test_resume_writes_a_missing_report(finished_run: Path) -> None:
    before = (finished_run / "report.html").read_bytes()
    (finished_run / "report.html").unlink()
    resume(finished_run)
    assert len((finished_run / "report.html").read_bytes()) == len(before)


def test_resume_without_the_dense_file_uses_the_copy(finished_run: Path, tmp_path: Path) -> None:
    """The run has a copy, because whatever interrupts it may also move its folders."""
    file = tmp_path / "dense.safetensors"
    file.write_bytes((finished_run / "dense.safetensors").read_bytes())
    finished_run, parted = tmp_path / "whole", tmp_path / "parted"
    train(small_config(finished_run, dense=str(file)))
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 3

    with pytest.raises(SmartpruneError, match="stopped in search"):
        train(small_config(parted, dense=str(file)), stop=stop)
    file.unlink()
    resume(parted)
    assert_same_run(finished_run, parted)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_error_says_how_to_continue(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a b"
    stopped_run(out)
    rows_so_far = (out / "metrics.jsonl").read_bytes()

    def fill(tick: object) -> None:
        (out / "metrics.jsonl").unlink(missing_ok=True)
        (out / "metrics.jsonl").symlink_to("/dev/full")

    with pytest.raises(SmartpruneError, match=r"No space left on device\); free some space, then continue with: (.*)") as error:
        resume(out, fill)
    assert shlex.split(str(error.value).partition("with: ")[2])[-1] == str(out)
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").write_bytes(rows_so_far)
    resume(out)
    assert_same_run(finished_run, out)
