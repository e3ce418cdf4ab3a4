"""Files, names and numbers that commands must reject with a clear message."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from torch import nn

import smartprune as sp
from helpers.training_jobs import SMALL_FLAGS, run_cli, small_config
from smartprune import SmartpruneError
from smartprune.experiments.bench.result import Bench, Timing
from smartprune.experiments.compare import compare
from smartprune.training.train import train

QUICK = ["--dense-epochs", "1", "--search-epochs", "1", "--finetune-epochs", "1"]


def network_with_layer(name: str, at: int = 1) -> nn.Module:
    model = nn.Sequential()
    for number in range(4):
        model.add_module(name if number == at else f"l{number}", nn.Linear(8, 8))
    return model


def network_with_unprintable_name() -> nn.Module:
    """A network whose first layer has an unprintable name."""
    model = nn.Sequential()
    for name, layer in (
        ("a\nb", nn.Conv2d(1, 8, 3)),
        ("c", nn.Conv2d(8, 8, 3)),
        ("flat", nn.Flatten()),
        ("fc", nn.Linear(128, 10)),
    ):
        model.add_module(name, layer)
    return model


def test_paths_must_be_valid_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "bad\udcff")
    for arguments in (
        ["train", *SMALL_FLAGS, "--out", path],
        ["sweep", *SMALL_FLAGS[:-4], "--out", path],
        ["train", *SMALL_FLAGS, "--out", f"{path}/run"],
    ):
        assert run_cli(*arguments) == 2
        assert r"bad\udcff" in capsys.readouterr().err
    with pytest.raises(SmartpruneError, match="is not valid UTF-8"):
        train(small_config(Path(path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\nb", "n" * 1001])
def test_layer_names_that_a_receipt_cannot_hold_are_errors(name: str) -> None:
    for prune in (
        lambda m: sp.plan(m, block="4x4", sparsity=0.5),
        lambda m: sp.attach(m, sp.Smart(), block="4x4", sparsity=0.5, steps=1),
    ):
        with pytest.raises(
            SmartpruneError, match=r"the name of layer '(a\\nb|nnn.*)' cannot be stored in a receipt.*or leave the layer out"
        ):
            prune(network_with_layer(name))
        prune(network_with_layer(name, at=3))  # a layer that is not pruned
    assert sp.plan(network_with_layer("é"), block="4x4", sparsity=0.5).layers[1].name == "é"


def test_tensor_names_that_a_packed_file_cannot_hold_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run_cli("train", *QUICK, "--model", f"{__name__}:network_with_unprintable_name", "--out", str(out)) == 2
    assert r"a packed file cannot hold the name 'a\nb.weight'" in capsys.readouterr().err
    assert not out.exists()


def failed_bench(*args: object, **kwargs: object) -> Bench:
    return Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 0.0, (), 0.0, "no such class"),), (), {}, {})


def test_failed_bench_keeps_earlier_results(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    (folder / "bench.json").write_text("{}")
    page = (folder / "report.html").stat().st_mtime_ns
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", failed_bench)
    assert run_cli("bench", str(folder)) == 1
    captured = capsys.readouterr()
    assert f"no engine could be timed, so {folder / 'bench.json'} is not written" in captured.err
    assert "failed: torch, batch 1: no such class" in captured.out
    assert ((folder / "bench.json").read_text(), (folder / "report.html").stat().st_mtime_ns) == ("{}", page)
    assert run_cli("bench", str(folder), "--out", str(tmp_path / "b.json")) == 1
    assert json.loads((tmp_path / "b.json").read_text())["timings"][0]["failed"] == "no such class"


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_too_large_numbers_are_errors(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_large_inputs_are_errors(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = "1x99999999x99999"
    assert run_cli("report", str(finished_run), "--npu", "edge", "--input", shape) == 2
    assert f"--input {shape} takes more memory" in capsys.readouterr().err
    quick = ["--engines", "torch", "--rounds", "1", "--seconds", "0.01"]
    assert run_cli("bench", str(finished_run), "--batch", "1", "99999999999", *quick) == 1
    assert "--batch 99999999999 takes more memory than is available; use something smaller" in capsys.readouterr().err
    assert not (finished_run / "bench.json").exists()


@pytest.fixture
def make_unreadable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes opening a file fail, because file permissions do not apply to root."""
    original, paths = io.open, set()

    def checked_open(file: Any, *arguments: Any, **options: Any) -> IO[Any]:
        if str(file) in paths:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return original(file, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(builtins, "open", checked_open)
    monkeypatch.setattr(io, "open", checked_open)  # used by pathlib
    return lambda path: paths.add(str(path))


def test_unreadable_models_are_errors(
    finished_run: Path, tmp_path: Path, make_unreadable: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model", "dense"):
        make_unreadable(finished_run / f"{name}.safetensors")
    out = str(tmp_path / "x.safetensors")
    for arguments in (
        ["report", str(finished_run)], ["verify", str(finished_run)], ["pack", str(finished_run), "--out", out],
        ["bench", str(finished_run)], ["export", str(finished_run), "--out", str(tmp_path / "x.onnx")], ["eval", str(finished_run)],
        ["train", *SMALL_FLAGS, "--dense", str(finished_run / "dense.safetensors"), "--out", str(tmp_path / "run")],
    ):  # fmt: skip
        assert run_cli(*arguments) in (1, 2), arguments
        errors = capsys.readouterr().err
        assert ".safetensors" in errors, arguments
        assert "cannot be read" in errors, arguments
        assert "(Permission denied)" in errors, (arguments, errors)
    assert not list(tmp_path.iterdir())


def test_unreadable_folder_is_left_out_of_a_comparison(tmp_path: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, original = tmp_path / "closed", os.scandir

    def checked_scandir(path: Any) -> Any:
        if str(path) == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return original(path)

    closed.mkdir()
    monkeypatch.setattr(os, "scandir", checked_scandir)
    comparison = compare([finished_run, tmp_path])
    assert len(comparison.runs) == 1
    assert list(comparison.left_out) == [(closed, "cannot be read (Permission denied); make it readable")]


def test_input_path_that_is_not_utf8_is_an_error(tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a file can exist. The command exits with a message."""
    path = tmp_path / "bad\udcff.safetensors"
    path.write_bytes((finished_run / "dense.safetensors").read_bytes())
    assert run_cli("train", *SMALL_FLAGS, "--dense", str(path), "--out", str(tmp_path / "run")) == 2
    assert "cannot be read as a .safetensors file" in capsys.readouterr().err
