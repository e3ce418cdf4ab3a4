"""The command line with care: what it must not write over, and what it refuses before the work, not after it."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from torch import nn

import smartprune as sp
from helpers.training_jobs import SMALL_FLAGS, command, environment, run_cli, small_config
from smartprune import SmartpruneError
from smartprune.cli.streams import discard_unwritten, print_message
from smartprune.experiments.bench.result import Bench, Timing
from smartprune.experiments.compare import compare
from smartprune.training.progress import Progress, Tick
from smartprune.training.train import train

FULL = Path("/dev/full")
QUICK = ["--dense-epochs", "1", "--search-epochs", "1", "--finetune-epochs", "1"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("care") / "run"
    train(small_config(out, dense_epochs=1, search_epochs=1))
    return out


def call(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command(*arguments), env=environment() | streams.pop("env", {}), timeout=120, check=False, **streams)


def closing(*handles: int) -> Callable[[], None]:
    """For a process that is started with these closed, as by ``>&-``."""

    def close() -> None:
        for handle in handles:
            os.close(handle)

    return close


def net(name: str, at: int = 1) -> nn.Module:
    model = nn.Sequential()
    for number in range(4):
        model.add_module(name if number == at else f"l{number}", nn.Linear(8, 8))
    return model


def odd_name() -> nn.Module:
    """A network whose stem has a name that does not print."""
    model = nn.Sequential()
    for name, layer in (
        ("a\nb", nn.Conv2d(1, 8, 3)),
        ("c", nn.Conv2d(8, 8, 3)),
        ("flat", nn.Flatten()),
        ("fc", nn.Linear(128, 10)),
    ):
        model.add_module(name, layer)
    return model


def test_what_stdout_leads_to_is_not_replaced(done: Path, tmp_path: Path) -> None:
    """A table, then the .csv file, after what was in the file before, in the file itself."""
    log = tmp_path / "notes.log"
    log.write_text("before\n")
    before = log.stat().st_ino
    with log.open("a") as file:
        assert call("compare", str(done), "--csv", "/dev/stdout", stdout=file, stderr=subprocess.PIPE).returncode == 0
    lines = log.read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("digits(width=4)")
    assert lines[-2].startswith("folder,data,model")
    assert log.stat().st_ino == before


def test_a_path_that_no_reader_could_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = str(tmp_path / "bad\udcff")
    for words in (
        ["train", *SMALL_FLAGS, "--out", bad],
        ["sweep", *SMALL_FLAGS[:-4], "--out", bad],
        ["train", *SMALL_FLAGS, "--out", f"{bad}/run"],
    ):
        assert run_cli(*words) == 2
        assert r"bad\udcff" in capsys.readouterr().err
    with pytest.raises(SmartpruneError, match="is not valid UTF-8"):
        train(small_config(Path(bad)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\nb", "n" * 1001])
def test_names_that_a_receipt_cannot_hold(name: str) -> None:
    for work in (
        lambda m: sp.plan(m, block="4x4", sparsity=0.5),
        lambda m: sp.attach(m, sp.Smart(), block="4x4", sparsity=0.5, steps=1),
    ):
        with pytest.raises(
            SmartpruneError, match=r"the name of layer '(a\\nb|nnn.*)' cannot be stored in a receipt.*or leave the layer out"
        ):
            work(net(name))
        work(net(name, at=3))  # which is not pruned
    assert sp.plan(net("é"), block="4x4", sparsity=0.5).layers[1].name == "é"


def test_names_that_a_packed_file_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_cli("train", *QUICK, "--model", f"{__name__}:odd_name", "--out", str(out)) == 2
    assert r"a packed file cannot hold the name 'a\nb.weight'" in capsys.readouterr().err
    assert not out.exists()


class Deaf:
    """A stream that takes so many texts and then none."""

    encoding = "utf-8"

    def __init__(self, left: int, error: Exception) -> None:
        self.left, self.error, self.asked = left, error, 0

    def write(self, text: str) -> None:
        self.asked += 1
        self.left -= 1
        if self.left < 0:
            raise self.error

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.ENOSPC, "full"), ValueError("closed")])
def test_progress_that_nobody_reads(error: Exception, tmp_path: Path) -> None:
    stream = Deaf(1, error)
    progress = Progress(stream)  # type: ignore[arg-type]
    tick = Tick("dense", 1, 1, 1, 1, 0.5, "accuracy", None, None, None, 1.0)
    for _ in range(4):
        progress(tick)
    progress.message("that it is silent")
    progress.close()
    assert stream.asked == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_run_that_nobody_watches_is_done(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        ended = call("train", *SMALL_FLAGS, *QUICK, "--out", str(tmp_path / "a"), stdout=subprocess.PIPE, stderr=full)
    assert ended.returncode == 0
    assert b"verified yes" in ended.stdout


def test_streams_that_are_closed(done: Path, tmp_path: Path) -> None:
    words = ["compare", str(done), "--csv", "/dev/stdout"]
    ended = call(*words, stderr=subprocess.PIPE, preexec_fn=closing(1))
    assert (ended.returncode, ended.stderr) == (0, b"written to /dev/stdout\n")
    out = tmp_path / "a"
    ended = call("train", *SMALL_FLAGS, *QUICK, "--out", str(out), preexec_fn=closing(1, 2))
    assert ended.returncode == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in done.iterdir())


def test_streams_that_know_only_ascii(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Größe"
    shutil.copytree(done, folder)
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ended = call("train", "--resume", "--out", str(folder), env=ascii_only, capture_output=True)
    assert ended.returncode == 0, ended.stderr
    assert rb"Gr\xf6\xdfe" in ended.stdout


def test_telling_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Deaf(0, OSError(errno.EPIPE, "gone")))
    print_message("nothing")
    closed = open(os.devnull, "w")  # noqa: SIM115
    closed.close()
    discard_unwritten(closed)


def failing(*given: object, **more: object) -> Bench:
    return Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 0.0, (), 0.0, "no such class"),), (), {}, {})


def test_a_bench_that_failed_leaves_what_was_measured(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done, folder)
    (folder / "bench.json").write_text("{}")
    page = (folder / "report.html").stat().st_mtime_ns
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", failing)
    assert run_cli("bench", str(folder)) == 1
    said = capsys.readouterr()
    assert f"no engine could be timed, so {folder / 'bench.json'} is not written" in said.err
    assert "failed: torch, batch 1: no such class" in said.out
    assert ((folder / "bench.json").read_text(), (folder / "report.html").stat().st_mtime_ns) == ("{}", page)
    assert run_cli("bench", str(folder), "--out", str(tmp_path / "b.json")) == 1
    assert json.loads((tmp_path / "b.json").read_text())["timings"][0]["failed"] == "no such class"


def test_an_unknown_setting_is_no_reason_to_crash(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"a": 1}')
    assert run_cli("train", "--resume", "--config", str(tmp_path / "c.json"), "--out", str(done)) == 2
    assert "unknown setting 'a'; the settings of a run are: task" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--threads", "4097"], "threads=4097 must be at most 4096"),
        (["train", "--threads", "99999999999999999999"], "must be at most 4096"),
        (["bench", "digits", "--threads", "4097"], "--threads 4097 must be at most 4096"),
        (["train", "--lr", "1e39"], "lr=1e+39 must be at most 3.4e+38"),
        (["train", "--search-lr", "1e39"], "search_lr=1e+39 must be"),
        (["train", "--finetune-lr", "1e39"], "finetune_lr=1e+39 must be"),
        (["train", "--score-lr", "1e39"], "score_lr=1e+39 must be"),
        (["train", "--weight-decay", "1e39"], "weight_decay=1e+39 must be"),
        (["plan", "digits", "--input", "99999999x99999"], "--input 99999999x99999 takes more memory than is available"),
        (["plan", "digits", "--input", "9999999999999999999999x1"], "takes more memory than is available"),
        (
            ["export", "digits", "--block", "8x4", "--out", "a.onnx", "--input", "1x99999999x99999"],
            "--input 1x99999999x99999 takes",
        ),
        (["train", "--task-set", "width=9999999999999"], "--model resnet8 --task-set width=9999999999999 --task-set shift=1 takes"),
    ],
)
def test_numbers_that_are_too_large(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(*words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_inputs_that_are_too_large(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "1x99999999x99999"
    assert run_cli("report", str(done), "--npu", "edge", "--input", shape) == 2
    assert f"--input {shape} takes more memory" in capsys.readouterr().err
    assert (
        run_cli("bench", str(done), "--batch", "1", "99999999999", "--engines", "torch", "--rounds", "1", "--seconds", "0.01") == 1
    )
    assert "--batch 99999999999 takes more memory than is available; use something smaller" in capsys.readouterr().err
    assert not (done / "bench.json").exists()


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Forbids to open a file, which permissions cannot do to root."""
    kept, paths = io.open, set()

    def guarded(file: Any, *arguments: Any, **options: Any) -> IO[Any]:
        if str(file) in paths:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return kept(file, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(builtins, "open", guarded)
    monkeypatch.setattr(io, "open", guarded)  # by pathlib
    return lambda path: paths.add(str(path))


def test_a_model_that_may_not_be_read(
    done: Path, tmp_path: Path, forbidden: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", "dense"):
        forbidden(done / f"{name}.safetensors")
    out = str(tmp_path / "x.safetensors")
    for words in (
        ["report", str(done)], ["verify", str(done)], ["pack", str(done), "--out", out], ["bench", str(done)],
        ["export", str(done), "--out", str(tmp_path / "x.onnx")], ["eval", str(done)],
        ["train", *SMALL_FLAGS, "--dense", str(done / "dense.safetensors"), "--out", str(tmp_path / "run")],
    ):  # fmt: skip
        assert run_cli(*words) in (1, 2), words
        said = capsys.readouterr().err
        assert ".safetensors" in said, words
        assert "cannot be read" in said, words
        assert "(Permission denied)" in said, (words, said)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_may_not_be_read(tmp_path: Path, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, kept = tmp_path / "closed", os.scandir

    def guarded(path: Any) -> Any:
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return kept(path)

    closed.mkdir()
    monkeypatch.setattr(os, "scandir", guarded)
    found = compare([done, tmp_path])
    assert len(found.runs) == 1
    assert list(found.left_out) == [(closed, "cannot be read (Permission denied); make it readable")]


def test_a_name_that_is_no_text_is_told(tmp_path: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of such a name can be there; it is not found out by a traceback."""
    bad = tmp_path / "bad\udcff.safetensors"
    bad.write_bytes((done / "dense.safetensors").read_bytes())
    assert run_cli("train", *SMALL_FLAGS, "--dense", str(bad), "--out", str(tmp_path / "run")) == 2
    assert "cannot be read as a .safetensors file" in capsys.readouterr().err
