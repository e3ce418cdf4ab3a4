"""``smartprune bench``: its output, its files and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.training_jobs import small_config
from smartprune import cli
from smartprune.experiments.bench.result import Bench, Timing
from smartprune.training.train import train

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "run"
    train(small_config(out))
    return out


def test_bench_times_a_run_folder(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "1", "3", "--rounds", "1", "--seconds", "0.01", "--engines", "torch", "smartprune"]
    assert cli.main(["bench", str(run_folder), *arguments, "--plot", str(tmp_path / "speed.svg")]) == 0
    printed = capsys.readouterr().out
    result = json.loads((run_folder / "bench.json").read_text())
    assert [(row["engine"], row["batch"]) for row in result["timings"]] == [
        ("torch", 1), ("smartprune", 1), ("torch", 3), ("smartprune", 3)
    ]  # fmt: skip
    for row in result["timings"]:
        assert row["failed"] is None, row
        assert row["ms"] > 0, row
        assert row["error"] < 1e-3, row
    assert {row["name"] for row in result["layers"]} >= {"conv1", "fc"}
    assert all(min(row["dense"], row["ours"]) >= 0 and row["engine"] == "torch" for row in result["layers"])
    assert all(len(line) <= 80 for line in printed.splitlines()[1:])  # the first line contains the path
    assert "times faster than the fastest dense engine" in printed
    assert (tmp_path / "speed.svg").read_text().count("<rect") >= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet18"], "add --input"),
        (["resnet18", "--input", "3x32x32", "--batch", "0"], "must be above 0"),
        (["resnet18", "--input", "3x32x32", "--seconds", "inf"], "and finite"),
        (["resnet18", "--input", "3x32x32", "--block", "16y8"], "block='16y8' cannot be read"),
        (["resnet18", "--input", "3x32x32", "--threads", "0"], "--threads 0 must be at least 1"),
        (["resnet18", "--input", "3x32x32", "--plot", "a.gif"], "must end in .svg or .png"),
        (["resnet18", "--input", "3x32x32", "--engines", "tvm"], "unknown engine --engines 'tvm'; choose from: torch"),
        (["nothing"], "unknown model 'nothing'"),
    ],
)
def test_wrong_arguments_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def bench_without_timings(*args: object, **kwargs: object) -> Bench:
    timings = (Timing("torch", 1, 0.0, (), 0.0, "no such class"), Timing("smartprune", 1, 0.0, (), 0.25, "off"))
    return Bench("m", "16x8", 1, 0.5, timings, (), {}, {})


def bench_with_one_timing(*args: object, **kwargs: object) -> Bench:
    failed = bench_without_timings()
    return Bench("m", "16x8", 1, 0.5, (*failed.timings, Timing("onnxruntime", 1, 2.0, (2.0,), 0.0)), (), {}, {})


def test_exit_code_is_1_if_every_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "resnet18", "--input", "3x32x32", "--out", str(tmp_path / "b.json"), "--json"]
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", bench_without_timings)
    assert cli.main(arguments) == 1
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "b.json").read_text())
    assert [(row["ms"], row["error"], row["failed"]) for row in result["timings"]] == [
        (None, None, "no such class"),
        (None, 0.25, "off"),
    ]
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", bench_with_one_timing)
    assert cli.main(arguments) == 0
    assert [row["ms"] for row in json.loads(capsys.readouterr().out)["timings"]] == [None, None, 2.0]


def test_input_replaces_the_input_of_the_run(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record_call(model: object, x: torch.Tensor, *, calibration: list[torch.Tensor], **kwargs: object) -> Bench:
        calls.append((tuple(x.shape), len(calibration) > 0))
        return bench_with_one_timing()

    monkeypatch.setattr("smartprune.experiments.bench.run.bench", record_call)
    arguments = ["bench", str(run_folder), "--out", str(tmp_path / "b.json")]
    assert cli.main(arguments) == 0
    assert cli.main([*arguments, "--input", "1x16x16"]) == 0
    assert calls == [((1, 1, 8, 8), True), ((1, 1, 16, 16), False)]


def test_bench_does_not_overwrite_its_inputs(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(run_folder / "model.safetensors")
    common = ["bench", "resnet18", "--input", "3x32x32", "--weights", weights]
    for arguments, message in (
        ([*common, "--out", weights], "is the file of --weights itself"),
        ([*common, "--out", str(tmp_path / "no" / "b.json")], f"the folder {tmp_path / 'no'} does not exist"),
        ([*common, "--plot", str(tmp_path / "no" / "b.svg")], f"the folder {tmp_path / 'no'} does not exist"),
        ([*common, "--out", str(tmp_path / "b.svg"), "--plot", str(tmp_path / "b.svg")], "--out and --plot are both"),
        (["bench", str(run_folder), "--out", str(run_folder / "config.json")], "is the config.json of the run itself"),
        (["bench", str(run_folder / "model.packed.safetensors")], "packed files work too"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
