"""Engines side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from jobs import small
from smartprune import SmartpruneError, cli, engines
from smartprune.engines import Bench, LayerTiming, Timing
from smartprune.train import train

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "run"
    train(small(out))
    return out


def test_a_run_side_by_side(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch", "1", "3", "--rounds", "1", "--seconds", "0.01", "--engines", "torch", "smartprune"]
    assert cli.main(["bench", str(done), *words, "--plot", str(tmp_path / "speed.svg")]) == 0
    shown = capsys.readouterr().out
    told = json.loads((done / "bench.json").read_text())
    assert [(row["engine"], row["batch"]) for row in told["timings"]] == [
        ("torch", 1), ("smartprune", 1), ("torch", 3), ("smartprune", 3)
    ]  # fmt: skip
    for row in told["timings"]:
        assert row["failed"] is None, row
        assert row["ms"] > 0, row
        assert row["error"] < 1e-3, row
    assert {row["name"] for row in told["layers"]} >= {"conv1", "fc"}
    assert all(row["dense"] > 0 and row["ours"] > 0 for row in told["layers"])
    assert all(len(line) <= 80 for line in shown.splitlines()[1:])  # the first one names the folder
    assert "x dense" in shown
    assert (tmp_path / "speed.svg").read_text().count("<rect") >= 5


def test_an_engine_that_fails_is_a_result(tmp_path: Path) -> None:
    torch.save((nn.Linear(3, 2), torch.zeros(1, 3), []), tmp_path / "case.pt")
    engine = engines.Engine("onnxruntime", tmp_path, 1)  # whose file is not there
    assert engine.failed is not None
    engine.close()
    timing = Timing("onnxruntime", 1, 0.0, (), 0.0, engine.failed)
    found = Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 2.0, (2.0,), 0.0), timing), (), {}, {})
    assert f"failed: onnxruntime, batch 1: {engine.failed}" in str(found)
    assert found.best(1, engines.DENSE).engine == "torch"  # type: ignore[union-attr]
    assert "onnxruntime" not in found.drawing().svg()


def test_an_engine_that_is_wrong_is_not_timed() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    right = model(x).detach()
    assert engines.difference("torch", right, model, x) == 0
    with pytest.raises(SmartpruneError, match="its outputs are off by"):
        engines.difference("smartprune", right * 1.01, model, x)
    assert engines.difference("smartprune int8", right * 1.01, model, x) == pytest.approx(0.01, abs=1e-3)


def test_ratios_are_over_the_fastest_dense_engine_of_a_kind() -> None:
    timings = tuple(
        Timing(name, 1, ms, (ms,), 0.0)
        for name, ms in (
            ("torch", 4.0),
            ("onnxruntime", 2.0),
            ("smartprune", 0.5),
            ("onnxruntime int8", 1.0),
            ("smartprune int8", 0.25),
        )
    )
    layer = LayerTiming("a.very.long.name." * 8, "3x3 conv", 1, 10, 100, 8.0, 2.0)
    lines = str(Bench("m", "16x8", 1, 0.9, timings, (layer,), {"GPU": "none"}, {})).splitlines()
    ratios = {" ".join(line.split()[:-3]): line.split()[-2] for line in lines[4:9]}
    assert ratios == {
        "torch": "0.50",
        "onnxruntime": "1.00",
        "smartprune": "4.00",
        "onnxruntime int8": "1.00",
        "smartprune int8": "4.00",
    }
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18"], "add --input"),
        (["resnet18", "--input", "3x32x32", "--batch", "0"], "should be above 0"),
        (["resnet18", "--input", "3x32x32", "--threads", "0"], "--threads 0 should be at least 1"),
        (["resnet18", "--input", "3x32x32", "--plot", "a.gif"], "should end in .svg or .png"),
        (["resnet18", "--input", "3x32x32", "--engines", "tvm"], "'tvm' is not known; there are: torch"),
        (["nothing"], "unknown model 'nothing'"),
    ],
)
def test_bad_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
