"""Files of a run folder: created, locked, damaged, unreadable."""

from __future__ import annotations

import errno
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch

from helpers.training_jobs import (
    StopAfter,
    metric_rows,
    small_config,
    stopped_run,
)
from smartprune import SmartpruneError
from smartprune.experiments.compare import compare
from smartprune.training.folder import append_row, locked
from smartprune.training.progress import Progress
from smartprune.training.train import resume, train


def test_non_empty_folder_is_an_error(finished_run: Path, tmp_path: Path) -> None:
    before = (finished_run / "model.safetensors").read_bytes()
    with pytest.raises(SmartpruneError, match="already holds a run; continue it with: smartprune train --resume"):
        train(small_config(finished_run))
    assert (finished_run / "model.safetensors").read_bytes() == before
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(SmartpruneError, match="is not empty and holds no run; choose another folder"):
        train(small_config(tmp_path))
    with pytest.raises(SmartpruneError, match="is a file; give a folder"):
        train(small_config(tmp_path / "note.txt"))


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert train(small_config(tmp_path / "empty", dense_epochs=0, search_epochs=1)).verified


def test_working_directory_can_be_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(small_config(Path()))
    assert (tmp_path / "result.json").exists()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "flip", "foreign", "other"])
def test_damaged_checkpoint_is_an_error(damage: str, tmp_path: Path) -> None:
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


def test_checkpoints_have_checksums_even_if_the_process_disables_them(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stopped_run(tmp_path / "run")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    resume(tmp_path / "run")


def test_checkpoint_of_another_run_is_an_error(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    with pytest.raises(SmartpruneError):
        train(small_config(tmp_path / "b", task_settings={"width": 8}), stop=StopAfter(20))
    (tmp_path / "a" / "checkpoint.pt").write_bytes((tmp_path / "b" / "checkpoint.pt").read_bytes())
    with pytest.raises(
        SmartpruneError, match=r"config\.json was changed after the run began: task_settings=.*'width': 4.*was.*'width': 8"
    ):
        resume(tmp_path / "a")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_unreadable_checkpoint_is_not_called_damaged(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(tmp_path / "a")

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("smartprune.artifacts.torch_file.zipfile.ZipFile", refuse)
        with pytest.raises(SmartpruneError, match=r"checkpoint\.pt cannot be read .*make it readable, then resume again") as error:
            resume(tmp_path / "a")
    assert os.strerror(number) in str(error.value)
    assert "delete" not in str(error.value)
    assert resume(tmp_path / "a").verified


def test_checkpoint_holds_tensors_and_plain_values_only(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    state = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)
    assert state["stage"] == "search"
    assert state["step"] == 6
    assert json.dumps({key: state[key] for key in ("stage", "step", "rows", "seconds")})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(SmartpruneError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        append_row(tmp_path, {"step": 1})


@pytest.mark.parametrize("left", ["none", "one", "torn", "noise", "missing"])
def test_run_continues_after_losing_rows_of_metrics(left: str, finished_run: Path, tmp_path: Path) -> None:
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
        resume(out, Progress(shown), StopAfter(6))
    assert f"{path} has lost {2 - len(kept)} rows; the run continues, and its curves have gaps\n" in shown.getvalue()
    shown = io.StringIO()
    with path.open("a") as file:
        file.write(json.dumps({"stage": "finetune", "epoch": 1, "step": 7}) + "\n")  # after the checkpoint
    resume(out, Progress(shown))
    assert "lost" not in shown.getvalue()
    expected = metric_rows(finished_run)
    assert metric_rows(out) == [expected[number] for number in (*kept, 2, 3, 4)]
    for name in ("dense.safetensors", "model.safetensors", "receipt.json"):
        assert (out / name).read_bytes() == (finished_run / name).read_bytes()
    assert (out / "report.html").stat().st_size > 10_000
    assert compare([out]).runs[0].folder == out


def test_lost_rows_are_a_warning_without_progress(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"metrics\.jsonl has lost 2 rows"):
        resume(tmp_path / "a")


def test_second_process_is_an_error(tmp_path: Path) -> None:
    stopped_run(tmp_path / "a")
    with locked(tmp_path / "a"), pytest.raises(SmartpruneError, match="another process is training in"):
        resume(tmp_path / "a")
    assert resume(tmp_path / "a").verified
