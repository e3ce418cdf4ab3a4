"""Estimates of whole models on an NPU, compared with recorded results of other simulators, and where they are shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.npus import IDEAL, SYSTOLIC
from helpers.training_jobs import run_cli
from smartprune import NPU, SmartpruneError
from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.core.usage import find_calls
from smartprune.hardware.npu import PRESETS
from smartprune.pruning.receipt import make_receipt

ROOT = Path(__file__).parents[2]


# ---- recorded results of other simulators


RECORD = json.loads((ROOT / "records" / "npu-check" / "result.json").read_text())
RECORDED = [row for row in RECORD["rows"] if not row["protocol"].startswith("smartprune")]


def make_layer(case: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    layer = nn.Conv2d(case["inputs"], case["outputs"], case["kernel"], padding=case["kernel"] // 2)
    with torch.no_grad():
        layer.weight.fill_(1)
        for row, kept in enumerate(case["kept"]):
            remaining = kept
            for first in range(0, case["inputs"], case["columns"]):
                for position in range(case["kernel"] ** 2):
                    if remaining == 0:
                        outputs = slice(row * case["rows"], (row + 1) * case["rows"])
                        layer.weight[
                            outputs, first : first + case["columns"], position // case["kernel"], position % case["kernel"]
                        ] = 0
                    remaining = max(0, remaining - 1)
    return layer, torch.zeros(1, case["inputs"], case["side"], case["side"])


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['protocol'].split()[0]}-{row['method']}")
def test_latency_matches_recorded_results_of_other_simulators(row: dict[str, Any]) -> None:
    case, scalesim = row["case"], row["protocol"].startswith("scalesim")
    npu = replace(SYSTOLIC if scalesim else IDEAL, rows=case["rows"], columns=case["columns"], index_bytes=0)
    npu = replace(npu, weight_bandwidth=case["bandwidth"] or math.inf)
    layer, x = make_layer(case)
    latency = npu.estimate(layer, x).latency
    assert sum(row["answers"]) == row["mean"]
    recorded = row["mean"] + (len(row["answers"]) if scalesim else 0)  # SCALE-Sim counts cycles from 0
    few_tiles = (
        case["bandwidth"] > 0
        and not case["kept"]
        and case["inputs"] * case["outputs"] * case["kernel"] ** 2 < 10 * npu.macs_per_cycle
    )
    slack = (
        case["side"] ** 2 if few_tiles else 0
    )  # with few tiles, ZigZag loads a second one before it starts (see the record's note)
    assert abs(latency - recorded) <= max(slack, 1e-3 * recorded)


def test_the_record_covers_all_cases() -> None:
    tools = {row["protocol"] for row in RECORDED}
    assert tools == {"zigzag-dse 3.9.1", "scalesim 3.0.0"}
    for tool in tools:
        cases = [row["case"] for row in RECORDED if row["protocol"] == tool]
        assert any(case["kept"] for case in cases)
        assert any(not case["kept"] for case in cases)


# ---- models


def test_calls_are_counted_for_one_sample() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    estimate = IDEAL.estimate(model, torch.zeros(3, 8))
    assert [layer.calls for layer in estimate.layers] == [2, 1]
    assert [layer.dense.latency for layer in estimate.layers] == [4, 2]  # twice 1 + 1, then 1 + 1
    tied, x = zoo.tied()
    by_name = {layer.name: layer for layer in IDEAL.estimate(tied, x, (4, 4)).layers}
    assert by_name["a"].calls == 2
    model, x = zoo.transformer_block()
    assert IDEAL.estimate(model, x).to_json() == IDEAL.estimate(model, x[:1]).to_json()
    (attention,) = (layer for layer in IDEAL.estimate(model, x).layers if layer.name == "attention.in_proj_weight")
    assert attention.dense.mac == 3 * 2 * 4  # three parts of 16x16, two tiles each, 4 tokens
    assert attention.dense.activation_bytes == 3 * (16 + 16) * 4


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_calls_match_the_macs_of_the_plan(name: str) -> None:
    model, x = zoo.SMALL[name]()
    layers, _ = find_layers(model, Block(4, 4), include="*")
    calls = find_calls(model, layers, x)
    total = 0
    for layer in layers:
        for call in calls[layer.name]:
            total += sum(part.uses for part in call) * layer.params // len(call)
    assert total == sp.plan(model, (4, 4), include="*", example=x).macs


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
@pytest.mark.parametrize("npu", [IDEAL, *PRESETS.values(), NPU(lanes=3, buffer_bytes=64)], ids=str)
def test_estimates_of_every_kind_of_model(name: str, npu: NPU) -> None:
    model, x = zoo.SMALL[name]()
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in find_layers(model, Block(4, 4), include="*")[0]:
            dict(model.named_parameters())[layer.weight].mul_(layer.grid.expand((torch.rand(layer.n) < 0.3).float()))
    estimate = npu.estimate(model, x, (4, 4))
    printed = str(estimate)
    assert max(map(len, printed.splitlines())) <= 80
    assert "MAC-only" in printed
    assert estimate.latency <= estimate.dense.latency
    assert estimate.speedup >= 1
    data = json.loads(json.dumps(estimate.to_json(), allow_nan=False))
    assert data["pruned"]["latency"] == sum(layer["pruned"]["latency"] for layer in data["layers"]) == estimate.latency
    assert data["ms"] == pytest.approx(estimate.latency / npu.clock_mhz / 1000)


def test_zeros_of_transformed_weights_are_not_skipped() -> None:
    class Standardized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)

    model = nn.Sequential(Standardized(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        for layer in model:
            layer.weight[:16] = 0
    first, second = IDEAL.estimate(model, torch.zeros(1, 32)).layers
    assert first.pruned.latency == first.dense.latency == second.dense.latency > second.pruned.latency


def test_estimate_uses_the_weights_of_a_file(tmp_path: Path) -> None:
    model, x = zoo.plain_cnn()
    other, _ = zoo.plain_cnn()
    with torch.no_grad():
        other[3].weight[:16].zero_()
    torch.save(other.state_dict(), tmp_path / "other.pt")
    estimate = NPU().estimate(model, x, (4, 4), weights=tmp_path / "other.pt")
    assert estimate.to_json()["layers"] == NPU().estimate(other, x, (4, 4)).to_json()["layers"]
    assert estimate.where == str(tmp_path / "other.pt")
    with pytest.raises(SmartpruneError, match=r"0.weight is 16x3x3x3 in the model and missing in the state dict"):
        NPU().estimate(model, x, weights={"3.weight": other[3].weight})


def test_default_block_is_the_receipts_or_the_arrays() -> None:
    model, x = zoo.plain_cnn()
    estimate = NPU(rows=4, columns=2).estimate(model, x)
    assert estimate.block == Block(4, 2)
    cycles = f"{estimate.latency:,} of {estimate.dense.latency:,} cycles"
    assert repr(estimate) == f"<Estimate of {estimate.where}: {len(estimate.layers)} layers, {cycles}, {estimate.ms:.3g} ms>"


def test_share_for_a_latency() -> None:
    model, x = zoo.plain_cnn()
    estimate = NPU(clock_mhz=100).estimate(model, x)
    goal = 0.6 * estimate.ms
    share = estimate.share(ms=goal)
    assert (1 - share) * estimate.dense.latency <= goal * 100_000
    assert float(share) == pytest.approx(0.4)
    assert estimate.share(ms=10 * estimate.ms) == 0
    for wrong in (0, -1, math.nan, math.inf, "3", True):
        with pytest.raises(SmartpruneError, match=r"ms=.* must be a number above 0"):
            estimate.share(ms=wrong)  # type: ignore[arg-type]


# ---- the command line


def test_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smartprune.models import MODELS

    path = str(tmp_path / "model.pt")
    torch.save(MODELS["resnet18"]().state_dict(), path)
    assert run_cli("report", path, "--npu", "edge", "--model", "resnet18", "--input", "3x32x32", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["npu"] == NPU.edge().to_json()
    assert data["dense"]["mac"] == data["pruned"]["mac"] == 4_362_304
    for arguments, message in (
        (["--npu", "edge"], "--npu needs the network of"),
        (["--npu", "edge", "--model", "resnet18"], "--npu needs the shape of one sample"),
        (["--npu", "none", "--model", "resnet18"], "npu 'none' is not known"),
        (["--input", "3x32x32"], "--input is only used with --npu"),
    ):
        assert run_cli("report", path, *arguments) == 2
        assert message in capsys.readouterr().err


def test_report_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from dataclasses import asdict

    from safetensors.torch import save_file

    from smartprune.training.config import configure, make_task

    config = configure({"sparsity": 0.75, "block": "8x4"})
    task = make_task(config.task, config.task_settings)
    model = task.model(config.model)
    plan = sp.plan(model, "8x4", 0.75)
    mask = sp.hard_topk(torch.rand(plan.n), plan.limit or 0)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for layer in plan.layers:
            named[layer.weight].mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    make_receipt(plan, named, mask, "random").save(tmp_path / "receipt.json")
    assert run_cli("report", str(tmp_path), "--npu", "small", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["block"] == "8x4x1x1"  # from the receipt
    assert data["layers"] == json.loads(json.dumps(NPU.small().estimate(model, task.example(), "8x4").to_json()))["layers"]
    assert data["speedup"] > 1


def test_plan_by_cycles(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "resnet18", "--cycles", "0.9", "--input", "3x32x32") == 0
    assert "budget   remove 90% of the NPU cycles: keep at most" in capsys.readouterr().out
    assert run_cli("plan", "resnet18", "--cycles", "0.9") == 2
    assert "--cycles needs the shape of one sample" in capsys.readouterr().err


def test_a_plan_of_infeasible_cycles_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is printed with the problem, as for a floor that is too high."""
    arguments = ("plan", "resnet18", "--cycles", "0.999", "--npu", "small", "--input", "3x32x32")
    assert run_cli(*arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Blocks of 16x8x1x1"
    assert lines[-2] == "budget   remove 99.9% of the NPU cycles"
    assert lines[-1].startswith("problem  cycles(0.999) cannot be met: ")
    assert run_cli(*arguments, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["feasible"] is False
    assert data["problem"].startswith("cycles(0.999) cannot be met")
    assert data["budget"] == {"kind": "cycles", "share": "999/1000"}
    assert data["layers"]


def test_the_speedup_can_exceed_the_mac_speedup() -> None:
    """A layer that waits for its weights also saves the time to fetch them, so the MAC speedup is not called a bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256))
    grid = Block(4, 4).grid((256, 256))
    with torch.no_grad():
        model[0].weight.mul_(grid.expand((torch.rand(grid.n) > 0.9).float()))
    estimate = NPU.edge().estimate(model, torch.zeros(1, 256), (4, 4))
    assert estimate.speedup > estimate.mac_speedup
    assert estimate.to_json()["mac_speedup"] == estimate.mac_speedup
    assert "bound" not in json.dumps(estimate.to_json())
    assert "bound" not in str(estimate)


def test_report_and_verify_with_the_network_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smartprune.models import MODELS

    path = str(tmp_path / "model.pt")
    torch.save(MODELS["mobilenetv2"]().state_dict(), path)
    for command in ("report", "verify"):
        assert run_cli(command, path, "--block", "16x8", "--json") == 0
        without_model = json.loads(capsys.readouterr().out)
        assert run_cli(command, path, "--block", "16x8", "--model", "mobilenetv2", "--json") == 0
        with_model = json.loads(capsys.readouterr().out)
        assert without_model["axes_assumed"]
        assert with_model["axes_assumed"] == []
        assert with_model["blocks"] != without_model["blocks"]  # depthwise convolutions have a row of blocks per channel
        assert run_cli(command, path, "--block", "16x8", "--model", "resnet18") == 1
        assert "does not belong to the model" in capsys.readouterr().err
        assert run_cli(command, path, "--block", "16x8", "--model", "nothing") == 2
        assert "unknown model 'nothing'" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert run_cli("report", path, "--block", "16x8", "--html", str(page)) == 0
    assert "are assumed to be (out, in, ...)" in page.read_text()
    assert run_cli("report", path, "--block", "16x8", "--html", str(page), "--model", "mobilenetv2") == 0
    assert "are assumed to be (out, in, ...)" not in page.read_text()
