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
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "run"
    train(small_config(out))
    return out


def test_bench_times_a_run_folder(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "1", "3", "--rounds", "1", "--seconds", "0.01", "--engines", "torch", "smartprune"]
    assert cli.main(["bench", str(done), *words, "--plot", str(tmp_path / "speed.svg")]) == 0
    shown = capsys.readouterr().out
    data = json.loads((done / "bench.json").read_text())
    assert [(row["engine"], row["batch"]) for row in data["timings"]] == [
        ("torch", 1), ("smartprune", 1), ("torch", 3), ("smartprune", 3)
    ]  # fmt: skip
    for row in data["timings"]:
        assert row["failed"] is None, row
        assert row["ms"] > 0, row
        assert row["error"] < 1e-3, row
    assert {row["name"] for row in data["layers"]} >= {"conv1", "fc"}
    assert all(row["dense"] > 0 and row["ours"] > 0 for row in data["layers"])
    assert all(len(line) <= 80 for line in shown.splitlines()[1:])  # the first one names the folder
    assert "speed-up" in shown
    assert (tmp_path / "speed.svg").read_text().count("<rect") >= 5


@pytest.mark.parametrize(
    ("words", "message"),
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
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def fails(*arguments: object, **more: object) -> Bench:
    timings = (Timing("torch", 1, 0.0, (), 0.0, "no such class"), Timing("smartprune", 1, 0.0, (), 0.25, "off"))
    return Bench("m", "16x8", 1, 0.5, timings, (), {}, {})


def half_fails(*arguments: object, **more: object) -> Bench:
    failed = fails()
    return Bench("m", "16x8", 1, 0.5, (*failed.timings, Timing("onnxruntime", 1, 2.0, (2.0,), 0.0)), (), {}, {})


def test_exit_code_is_1_where_every_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "resnet18", "--input", "3x32x32", "--out", str(tmp_path / "b.json"), "--json"]
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", fails)
    assert cli.main(words) == 1
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads((tmp_path / "b.json").read_text())
    assert [(row["ms"], row["error"], row["failed"]) for row in data["timings"]] == [
        (None, None, "no such class"),
        (None, 0.25, "off"),
    ]
    monkeypatch.setattr("smartprune.experiments.bench.run.bench", half_fails)
    assert cli.main(words) == 0
    assert [row["ms"] for row in json.loads(capsys.readouterr().out)["timings"]] == [None, None, 2.0]


def test_input_replaces_the_input_of_the_run(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(model: object, x: torch.Tensor, *, calibration: list[torch.Tensor], **more: object) -> Bench:
        seen.append((tuple(x.shape), len(calibration) > 0))
        return half_fails()

    monkeypatch.setattr("smartprune.experiments.bench.run.bench", note)
    words = ["bench", str(done), "--out", str(tmp_path / "b.json")]
    assert cli.main(words) == 0
    assert cli.main([*words, "--input", "1x16x16"]) == 0
    assert seen == [((1, 1, 8, 8), True), ((1, 1, 16, 16), False)]


def test_bench_does_not_overwrite_its_inputs(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(done / "model.safetensors")
    common = ["bench", "resnet18", "--input", "3x32x32", "--weights", weights]
    for words, message in (
        ([*common, "--out", weights], "is the file of --weights itself"),
        ([*common, "--out", str(tmp_path / "no" / "b.json")], f"the folder {tmp_path / 'no'} does not exist"),
        ([*common, "--plot", str(tmp_path / "no" / "b.svg")], f"the folder {tmp_path / 'no'} does not exist"),
        ([*common, "--out", str(tmp_path / "b.svg"), "--plot", str(tmp_path / "b.svg")], "--out and --plot are both"),
        (["bench", str(done), "--out", str(done / "config.json")], "is the config.json of the run itself"),
        (["bench", str(done / "model.packed.safetensors")], "packed files work too"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
