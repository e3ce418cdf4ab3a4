"""Engines side by side."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.jobs import small
from smartprune import SmartpruneError, cli
from smartprune.experiments.bench import engines
from smartprune.experiments.bench.engines import Bench, LayerTiming, Timing
from smartprune.training.train import train

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
    assert [(row["ms"], row["error"]) for row in found.to_json()["timings"]] == [(2.0, 0.0), (None, None)]


def test_a_drawing_where_every_engine_failed() -> None:
    failed = Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 0.0, (), 0.0, "it failed"),), (), {}, {})
    assert "batch 1" in failed.drawing().svg()
    assert "torch" not in failed.drawing().svg()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(input=x)


def test_a_layer_alone_whose_input_has_a_name() -> None:
    for engine in ("torch", "smartprune"):
        assert engines.alone(engine, Named().eval(), torch.randn(2, 8), seconds=0.0)["fc"][0] == "linear"


class Number(nn.Module):
    def forward(self, x: torch.Tensor) -> float:
        return 1.0


def test_an_engine_that_is_wrong_is_not_timed() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    right = model(x).detach()
    assert engines.difference("torch", right, model, x) == 0
    with pytest.raises(SmartpruneError, match=r"its outputs are off by 0\.01; 0\.001 is allowed"):
        engines.difference("smartprune", right * 1.01, model, x)
    assert engines.difference("smartprune", right * 1.01, model, x, allowed=0.02) == pytest.approx(0.01, rel=1e-3)
    for other in (right[:1], right * torch.inf, right * torch.nan):
        with pytest.raises(SmartpruneError, match="another shape than torch's, or other NaN or infinite numbers"):
            engines.difference("torch", [other], model, x)
    with pytest.raises(SmartpruneError, match="no tensors to compare"):
        engines.difference("torch", [], Number(), x)


def test_int8_errors_are_of_the_spread() -> None:
    model, x = nn.Identity(), torch.tensor([[99.0, 101.0]])
    assert engines.difference("smartprune int8", x + 0.25, model, x) == pytest.approx(0.25)
    with pytest.raises(SmartpruneError, match=r"off by 0\.75; 0\.5 is allowed"):
        engines.difference("openvino int8", x + 0.75, model, x)
    assert engines.difference("openvino int8", (x + 0.75).numpy(), model, x, allowed=1.0) == pytest.approx(0.75)
    one = torch.tensor([[4.0]])  # which has no spread
    assert engines.difference("smartprune int8", one + 1, model, one) == pytest.approx(0.25)
    gap = torch.tensor([[-torch.inf, 1.0, 3.0]])  # what torch leaves infinite does not count
    assert engines.difference("smartprune int8", gap, model, gap) == 0


def test_the_process_of_an_engine_knows_what_is_allowed(tmp_path: Path) -> None:
    torch.save((nn.Linear(3, 2), torch.ones(1, 3), []), tmp_path / "case.pt")
    engine = engines.Engine("torch", tmp_path, 1, allowed=-1.0)
    engine.close()
    assert engine.failed == "SmartpruneError: its outputs are off by 0; -1 is allowed"


class Fake:
    """An engine that notes when it is asked."""

    name, error, failed = "smartprune", 0.25, None

    def __init__(self, ms: float, asked: list[float]) -> None:
        self.ms, self.asked = ms, asked

    def ask(self, what: dict[str, float]) -> dict[str, float]:
        self.asked.append(self.ms)
        return {"ms": self.ms + len(self.asked)}


def test_engines_take_turns_also_under_one_name() -> None:
    asked: list[float] = []
    group: list[Any] = [Fake(ms, asked) for ms in (10.0, 20.0, 30.0)]
    group[1].failed = "off"
    found = engines.times(group, 4, 3, 0.1)
    assert asked == [10, 30, 30, 10, 30, 10]
    assert found[0] == Timing("smartprune", 4, 11.0, (11.0, 14.0, 16.0), 0.25)
    assert found[1] == Timing("smartprune", 4, 0.0, (), 0.25, "off")
    assert found[2] == Timing("smartprune", 4, 32.0, (32.0, 33.0, 35.0), 0.25)


def test_openvino_takes_part_where_it_is_installed() -> None:
    for package in ("openvino", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 10))
    inputs = [torch.randn(2, 8, 6, 6) for _ in range(4)]
    names = ("torch", "onnxruntime", "openvino", "onnxruntime int8", "openvino int8")
    found = engines.bench(model, inputs[0][:1], batches=(2,), rounds=2, seconds=0.01, calibration=inputs, only=names)
    assert [timing.engine for timing in found.timings] == list(names)
    assert all(timing.failed is None and timing.ms > 0 and len(timing.rounds) == 2 for timing in found.timings), found.timings
    errors = {timing.engine: timing.error for timing in found.timings}
    assert errors["openvino"] < 1e-5
    assert 1e-5 < errors["openvino int8"] < 0.1  # not float32 under another name
    assert found.left_out == {}
    assert found.versions["openvino"]


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if some packages were not installed, and all others were."""
    real: Callable[..., object] = importlib.util.find_spec

    def find(name: str, *more: str) -> object:
        return (None if name in packages else name) if name.startswith(("onnx", "openvino")) else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def last_lines(left_out: dict[str, str]) -> list[str]:
    """What is shown below the tables."""
    shown = str(Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 2.0, (2.0,), 0.0),), (), left_out, {}))
    return shown.splitlines()[shown.splitlines().index("torch   2.000     1.00  0.0e+00") + 3 :]


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    names, left_out = engines.engines()
    assert names == list(engines.CPU)
    assert last_lines(left_out) == ["left out: GPU: torch finds no CUDA device"]
    without(monkeypatch, "openvino")
    names, left_out = engines.engines()
    assert names == [name for name in engines.CPU if not name.startswith("openvino")]
    assert last_lines(left_out) == ["left out: openvino: not installed; GPU: torch finds no CUDA device"]
    without(monkeypatch, "onnxscript")
    names, left_out = engines.engines()
    assert names == ["torch", "torch channels-last", "smartprune", "smartprune int8"]
    assert last_lines(left_out) == [
        "left out: onnxruntime, openvino: onnxscript not installed (smartprune[onnx]);",
        "  GPU: torch finds no CUDA device",
    ]
    assert last_lines({"onnxruntime int8": "too coarse"}) == ["left out: onnxruntime int8: too coarse"]


def test_only_what_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "openvino")
    for name, why in (("openvino int8", "openvino: not installed"), ("torch cuda bf16", "GPU: torch finds no CUDA device")):
        with pytest.raises(SmartpruneError, match=f"bench: {name} cannot be timed here; left out: .*{why}"):
            engines.bench(nn.Linear(16, 16), torch.zeros(1, 16), only=[name])


def test_a_model_that_cannot_be_exported_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise SmartpruneError("no\nmore")

    monkeypatch.setattr("smartprune.artifacts.onnx_export.export_onnx", refuse)
    names = ["torch", "onnxruntime", "openvino int8"]
    found = engines.prepare(nn.Linear(16, 16), torch.zeros(1, 16), [], tmp_path, names, "16x8")
    assert found == {"onnxruntime": "no", "openvino int8": "no"}
    assert [path.name for path in tmp_path.iterdir()] == ["case.pt"]


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
        (["resnet18", "--input", "3x32x32", "--seconds", "inf"], "not without end"),
        (["resnet18", "--input", "3x32x32", "--block", "16y8"], "block='16y8' cannot be read"),
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


def fails(*given: object, **more: object) -> Bench:
    timings = (Timing("torch", 1, 0.0, (), 0.0, "no such class"), Timing("smartprune", 1, 0.0, (), 0.25, "off"))
    return Bench("m", "16x8", 1, 0.5, timings, (), {}, {})


def half_fails(*given: object, **more: object) -> Bench:
    found = fails()
    return Bench("m", "16x8", 1, 0.5, (*found.timings, Timing("onnxruntime", 1, 2.0, (2.0,), 0.0)), (), {}, {})


def test_where_every_engine_fails_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "resnet18", "--input", "3x32x32", "--out", str(tmp_path / "b.json"), "--json"]
    monkeypatch.setattr(engines, "bench", fails)
    assert cli.main(words) == 1
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "b.json").read_text())
    assert [(row["ms"], row["error"], row["failed"]) for row in told["timings"]] == [
        (None, None, "no such class"),
        (None, 0.25, "off"),
    ]
    monkeypatch.setattr(engines, "bench", half_fails)
    assert cli.main(words) == 0
    assert [row["ms"] for row in json.loads(capsys.readouterr().out)["timings"]] == [None, None, 2.0]


def test_an_input_is_in_place_of_that_of_the_run(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(model: object, x: torch.Tensor, *, calibration: list[torch.Tensor], **more: object) -> Bench:
        seen.append((tuple(x.shape), len(calibration) > 0))
        return half_fails()

    monkeypatch.setattr(engines, "bench", note)
    words = ["bench", str(done), "--out", str(tmp_path / "b.json")]
    assert cli.main(words) == 0
    assert cli.main([*words, "--input", "1x16x16"]) == 0
    assert seen == [((1, 1, 8, 8), True), ((1, 1, 16, 16), False)]


def test_bench_keeps_what_it_reads(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = str(done / "model.safetensors")
    common = ["bench", "resnet18", "--input", "3x32x32", "--weights", weights]
    for words, message in (
        ([*common, "--out", weights], "is the file of --weights itself"),
        ([*common, "--out", str(tmp_path / "no" / "b.json")], "there is no folder"),
        ([*common, "--plot", str(tmp_path / "no" / "b.svg")], "there is no folder"),
        ([*common, "--out", str(tmp_path / "b.svg"), "--plot", str(tmp_path / "b.svg")], "--out and --plot are both"),
        (["bench", str(done), "--out", str(done / "config.json")], "is the config.json of the run itself"),
        (["bench", str(done / "model.packed.safetensors")], "smartprune unpack makes a plain one"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
