"""Promise 6: interrupted is uninterrupted. Processes are really killed, at random moments."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shlex
import signal
import subprocess
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from helpers.training_jobs import SMALL_FLAGS, assert_same_run, command, environment, metric_rows, small_config
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.experiments.compare import compare
from smartprune.training.folder import append_row, locked
from smartprune.training.progress import Progress
from smartprune.training.result import Result
from smartprune.training.train import resume, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small_config(out))
    return out


class After:
    """Asks a run to stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("every", [1, 3, 7, 11])
def test_stopped_and_resumed_again_and_again(every: int, whole: Path, tmp_path: Path) -> None:
    """35 steps: 14 dense, 14 of search, 7 of fine-tuning; the stops fall into, onto and between epochs and stages."""
    out, stops = tmp_path / "run", 1
    with pytest.raises(SmartpruneError, match=r"stopped in dense, after step .*; continue with: smartprune train --resume"):
        train(small_config(out), stop=After(every))
    while not (out / "result.json").exists():
        torch.rand(1)
        with suppress(SmartpruneError):
            resume(out, stop=After(every))
        stops += 1
    assert stops == 35 // every + 1
    assert_same_run(whole, out)


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
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


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    flags = [*SMALL_FLAGS, "--dense-epochs", "6", "--search-epochs", "8", "--finetune-epochs", "6"]
    longer = {"dense_epochs": 6, "search_epochs": 8, "finetune_epochs": 6}
    train(small_config(tmp_path / "whole", **longer))
    moments, out, kills = random.Random(4), tmp_path / "run", 0
    arguments = [*flags, "--checkpoint-seconds", "0", "--out", str(out)]
    for _ in range(6):
        process = start(*arguments, folder=tmp_path)
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
    last = start("--resume", "--out", str(out), folder=tmp_path)
    _, errors = last.communicate(timeout=100)
    assert last.returncode == 0, errors
    assert_same_run(tmp_path / "whole", out)
    assert not list(out.glob(".*"))


ENDLESS = ["--dense-epochs", "100000", "--checkpoint-seconds", "1000"]


def test_sigterm_writes_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(*SMALL_FLAGS, *ENDLESS, "--out", str(out), folder=tmp_path)
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


def test_ctrl_c_does_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_rows_after_the_checkpoint_are_written_once(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SmartpruneError):
        train(small_config(out), stop=After(10))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "dense", "epoch": 2}\n{"half a r')
    (out / ".checkpoint.pt.abc.part").write_bytes(b"half")
    resume(out)
    assert_same_run(whole, out)
    assert not list(out.glob(".*"))


def test_killed_while_finishing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert_same_run(whole, out)


def test_commands_to_go_on_with_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my runs" / "it's a run"
    with pytest.raises(SmartpruneError, match="continue with: ") as stopped:
        train(small_config(folder), stop=lambda: True)
    with pytest.raises(SmartpruneError, match="continue it with: ") as held:
        train(small_config(folder))
    for said in (str(stopped.value), str(held.value).partition(", or choose")[0]):
        assert shlex.split(said.partition("with: ")[2]) == ["smartprune", "train", "--resume", "--out", str(folder)]


def test_no_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=r"holds no run \(no config.json\); start one without --resume"):
        resume(tmp_path)


def test_no_checkpoint_yet_starts_from_the_beginning(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SmartpruneError):
        train(small_config(out), stop=After(1))
    (out / "checkpoint.pt").unlink()
    resume(out)
    assert_same_run(whole, out)


def stopped_run(out: Path) -> None:
    with pytest.raises(SmartpruneError, match="stopped"):
        train(small_config(out), stop=After(20))


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "flip", "foreign", "other"])
def test_damaged_checkpoint_is_an_error_not_a_crash(damage: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stopped_run(out)
    path = out / "checkpoint.pt"
    data = path.read_bytes()
    if damage == "foreign":
        torch.save({"version": 1, "model": Path("x")}, path)  # an object: its code must not run
    elif damage == "other":
        torch.save({"step": 3}, path)
    else:
        with zipfile.ZipFile(path) as archive:
            largest = archive.read(max(archive.infolist(), key=lambda entry: entry.file_size))
        at = data.index(largest) + len(largest) // 2  # among the numbers of a tensor: torch would load it
        flip = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        path.write_bytes({"empty": b"", "cut": data[:at], "noise": b"\x80\x02" + bytes(500), "flip": flip}[damage])
    with pytest.raises(SmartpruneError, match=r"checkpoint\.pt is (damaged|not a checkpoint).*delete it to restart") as error:
        resume(out)
    assert "weights_only" not in str(error.value)  # torch's advice is to run what is in there


def test_a_process_that_saves_without_checksums_still_resumes(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stopped_run(tmp_path / "run")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    resume(tmp_path / "run")


def test_checkpoint_of_another_run(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    with pytest.raises(SmartpruneError):
        train(small_config(tmp_path / "b", task_settings={"width": 8}), stop=After(20))
    (tmp_path / "a" / "checkpoint.pt").write_bytes((tmp_path / "b" / "checkpoint.pt").read_bytes())
    with pytest.raises(SmartpruneError, match=r"checkpoint\.pt does not fit config\.json beside it"):
        resume(tmp_path / "a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(SmartpruneError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        append_row(tmp_path, {"step": 1})


@pytest.mark.parametrize("left", ["none", "one", "torn", "noise", "missing"])
def test_lost_rows_do_not_lose_the_run(left: str, whole: Path, tmp_path: Path) -> None:
    """What a power cut may leave of the rows: the run goes on from its checkpoint, says so once, and writes no row twice."""
    out, shown = tmp_path / "a", io.StringIO()
    stopped_run(out)
    path = out / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text({"one": second, "torn": first + second[:40], "noise": first + "\0" * 50}.get(left, ""))
    if left == "missing":
        path.unlink()
    kept = {"one": [1], "torn": [0], "noise": [0]}.get(left, [])
    with pytest.raises(SmartpruneError, match="stopped in search, after step 12 "):
        resume(out, Progress(shown), After(6))
    assert f"{path} has lost {2 - len(kept)} rows; the run continues, and its curves have gaps\n" in shown.getvalue()
    shown = io.StringIO()
    with path.open("a") as file:
        file.write(json.dumps({"stage": "finetune", "epoch": 1, "step": 7}) + "\n")  # after the checkpoint
    resume(out, Progress(shown))
    assert "lost" not in shown.getvalue()
    expected = metric_rows(whole)
    assert metric_rows(out) == [expected[number] for number in (*kept, 2, 3, 4)]
    for name in ("dense.safetensors", "model.safetensors", "receipt.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert (out / "report.html").stat().st_size > 10_000
    assert compare([out]).runs[0].folder == out


def test_lost_rows_are_told_to_whom_shows_no_text(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.jsonl has lost 2 rows"):
        resume(tmp_path / "a")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_run(tmp_path / "a")

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("smartprune.training.folder.zipfile.ZipFile", refuse)
        with pytest.raises(SmartpruneError, match=r"checkpoint\.pt cannot be read .*make it readable, then resume again") as error:
            resume(tmp_path / "a")
    assert os.strerror(number) in str(error.value)
    assert "delete" not in str(error.value)
    assert resume(tmp_path / "a").verified


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": "x"}, {"also": 3}, {"also": {"dense": {"top5": []}}}, {"files": []}, {"stage_seconds": [1]}, {"dense": "a"},
        {"pruned": True}, {"versions": {"torch": 2}}, {"folder": None}, {"verified": 1}, {"seconds": 10**400},
    ],
)  # fmt: skip
def test_a_damaged_result_is_told_with_its_cure(wrong: dict[str, object], whole: Path, tmp_path: Path) -> None:
    result = json.loads((whole / "result.json").read_text())
    assert asdict(Result.load(whole)) == result
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(result | wrong))
    where = f"{tmp_path / 'result.json'}: "
    with pytest.raises(
        SmartpruneError, match=rf"^{where}.*; it must be .*Delete result.json and finish the run again from its last checkpoint"
    ):
        resume(tmp_path)
    for text in ("", "[]", "{}", '{"a": NaN}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(SmartpruneError, match=r"Delete result\.json and finish the run again from its last checkpoint"):
            resume(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_run_on_a_full_disk_says_how_to_go_on(whole: Path, tmp_path: Path) -> None:
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
    assert_same_run(whole, out)


def test_second_process_is_kept_out(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    with locked(tmp_path / "a"), pytest.raises(SmartpruneError, match="another process is training in"):
        resume(tmp_path / "a")
    assert resume(tmp_path / "a").verified


def test_checkpoint_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    state = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)
    assert state["stage"] == "search"
    assert state["step"] == 6
    assert json.dumps({key: state[key] for key in ("stage", "step", "rows", "seconds")})
