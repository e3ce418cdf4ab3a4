"""The NPU model against a slow simulation, hand-made examples, and the recorded figures of two public simulators."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smartprune as sp
from helpers import zoo
from helpers.npus import IDEAL, MACHINES, SYSTOLIC
from helpers.training_jobs import run_cli
from smartprune import NPU, SmartpruneError
from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.core.usage import find_calls
from smartprune.hardware.npu import PRESETS, read_npu
from smartprune.pruning.receipt import make_receipt

ROOT = Path(__file__).parents[2]


# ---- a slow simulation: it walks over blocks, tiles, pixels and cycles, and shares nothing with the model but its rules


def boxes(weight: Tensor, module: nn.Module, block: tuple[int, ...]) -> dict[int, list[dict[str, Any]]]:
    """The blocks of every row of outputs, with what is in them, found by walking over the elements."""
    transposed, groups = isinstance(module, nn.ConvTranspose2d), getattr(module, "groups", 1)
    per_in, per_out = weight.shape[0] // groups, weight.shape[1]
    if not transposed:
        per_in, per_out = weight.shape[1], weight.shape[0] // groups
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for index, value in zip(
        torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist(), weight.reshape(-1).tolist(), strict=True
    ):
        first, second, kernel = index[0], index[1], tuple(index[2:])
        if transposed:
            part, into, out = first // per_in, first % per_in, second
        else:
            part, out, into = first // per_out, first % per_out, second
        kernel_step = tuple(k // s for k, s in zip(kernel, block[2:], strict=False))
        place = (part, out // block[0], into // block[1], *kernel_step)
        box = found.setdefault(place, {"outs": set(), "ins": set(), "kernel": set(), "elements": 0, "live": False})
        box["outs"].add(out)
        box["ins"].add(into)
        box["kernel"].add(kernel)
        box["elements"] += 1
        box["live"] |= value != 0
    rows: dict[int, list[dict[str, Any]]] = {}
    steps = 1 + max(place[1] for place in found)
    for place, box in sorted(found.items()):
        rows.setdefault(place[0] * steps + place[1], []).append({**box, "part": place[0]})
    return rows


def lanes_done(npu: NPU, queue: list[int]) -> int:
    """Cycle by cycle: an idle lane takes the next row; when is the last one done?"""
    left, waiting, cycle = [0] * npu.lanes, list(queue), 0
    while True:
        for lane in range(npu.lanes):
            while left[lane] == 0 and waiting:
                left[lane] = waiting.pop(0)
        if not any(left):
            return cycle
        left = [max(0, n - 1) for n in left]
        cycle += 1


def tiles_of(npu: NPU, box: dict[str, Any]) -> int:
    count = 0
    for _ in range(0, len(box["outs"]), npu.rows):
        for _ in range(0, len(box["ins"]), npu.columns):
            for _ in box["kernel"]:
                count += 1
    return count


def simulate(
    npu: NPU, weight: Tensor, module: nn.Module, block: tuple[int, ...] | None, pixels: tuple[int, int, int]
) -> dict[str, int]:
    """What a call of the layer takes with these blocks and no others, one by one; without a block, dense."""
    uses, reads, writes = pixels
    skips = block is not None
    if block is None:  # tiles of the array's own shape
        weight, block = torch.ones_like(weight), (npu.rows, npu.columns, *([10**6] * (weight.dim() - 2)))
    rows = boxes(weight, module, block)
    live = {row: [box for box in inside if box["live"]] for row, inside in rows.items()}
    parts = 1 + max(box["part"] for row in rows.values() for box in row)
    outputs = len({(box["part"], out) for row in rows.values() for box in row for out in box["outs"]})
    needed = {(box["part"], into) for row in live.values() for box in row for into in box["ins"]}
    bits = sum(npu.weight_bits * box["elements"] + (8 * npu.index_bytes if skips else 0) for row in live.values() for box in row)
    pieces = max(1, math.ceil(npu.activation_bits * reads * len(needed) / (8 * npu.buffer_bytes)))
    ways = [(1, False)] if pieces == 1 else [(1, True), (pieces, False)]
    answers = []
    for passes, again in ways:
        queue, mac = [], 0
        for inside in live.values():
            cycles = 0
            for box in inside:
                for _ in range(tiles_of(npu, box)):
                    cycles += passes * npu.fold
                    for _ in range(uses):
                        cycles += 1
                        mac += 1
            queue.append(cycles)
        if again:  # rows that run at the same time share what they fetch
            fetched = 0
            for part in range(parts):
                own = [row for row in rows.values() if row[0]["part"] == part]
                alive = [{into for box in row if box["live"] for into in box["ins"]} for row in own]
                for first in range(0, len(own), npu.lanes):
                    turn = own[first : first + npu.lanes]
                    for _ in range(0, max(len(row[0]["outs"]) for row in turn), npu.rows):
                        fetched += len(set().union(*alive[first : first + npu.lanes]))
        else:
            fetched = len(needed)
        moved = npu.activation_bits * (reads * fetched + writes * outputs)
        compute = lanes_done(npu, queue)
        weight_cycles = 0 if math.isinf(npu.weight_bandwidth) else math.ceil(bits * passes / (8 * npu.weight_bandwidth))
        moving = 0 if math.isinf(npu.activation_bandwidth) else math.ceil(moved / (8 * npu.activation_bandwidth))
        first = min(npu.rows, outputs // parts) * min(npu.columns, weight.numel() // outputs // math.prod(weight.shape[2:]))
        load = 0 if math.isinf(npu.weight_bandwidth) else math.ceil(npu.weight_bits * first / (8 * npu.weight_bandwidth))
        lead = min(load, uses + npu.fold) if mac else 0
        answers.append(
            {
                "latency": max(compute, weight_cycles, moving) + lead + (npu.dataflow == "output_stationary"),
                "bytes": math.ceil(bits * passes / 8) + math.ceil(moved / 8),
                "mac": math.ceil(mac / npu.lanes),
                "busy": sum(queue),
                "compute": compute,
                "weight_bytes": math.ceil(bits * passes / 8),
                "activation_bytes": math.ceil(moved / 8),
                "weight_cycles": weight_cycles,
                "activation_cycles": moving,
            }
        )
    return min(answers, key=lambda answer: (answer["latency"], answer["bytes"]))


def quickest(npu: NPU, weight: Tensor, module: nn.Module, block: tuple[int, ...], pixels: tuple[int, int, int]) -> dict[str, int]:
    """The pruned layer, which runs dense where that is quicker."""
    both = [simulate(npu, weight, module, b, pixels) for b in (block, None)]
    return min(both, key=lambda answer: (answer["latency"], answer["bytes"]))


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor, tuple[int, ...], tuple[int, int, int]]:
    """A layer, an input, a block, and (uses, reads, writes) worked out by hand."""
    kind = draw(st.sampled_from(["linear", "conv", "grouped", "transposed"]))
    into, out, side = draw(st.integers(1, 7)), draw(st.integers(1, 9)), draw(st.integers(2, 4))
    block = (draw(st.integers(1, 6)), draw(st.integers(1, 5)))
    if kind == "linear":
        return nn.Linear(into, out), torch.zeros(1, side, into), block, (side, side, side)
    if kind == "transposed":
        module: nn.Module = nn.ConvTranspose2d(2 * into, 2 * out, 2, stride=2, groups=draw(st.sampled_from([1, 2])))
        return module, torch.zeros(1, 2 * into, side, side), (*block, 1, 2), (side**2, side**2, 4 * side**2)
    groups = draw(st.sampled_from([2, 3])) if kind == "grouped" else 1
    kernel = draw(st.sampled_from([1, 3]))
    module = nn.Conv2d(groups * into, groups * out, kernel, padding=kernel // 2, stride=2, groups=groups)
    half = (side + 1) // 2
    return module, torch.zeros(1, groups * into, side, side), (*block, 1, 1), (half**2, side**2, half**2)


@given(layers(), MACHINES, st.floats(0, 1), st.integers(0, 10**6))
@settings(max_examples=400, deadline=None)
def test_every_figure_matches_a_slow_simulation(case: Any, npu: NPU, density: float, seed: int) -> None:
    module, x, block, pixels = case
    draw = torch.Generator().manual_seed(seed)
    grid = find_layers(module, Block(*block), include="*")[0][0].grid
    with torch.no_grad():
        module.weight.copy_(torch.rand(module.weight.shape, generator=draw) + 0.1)
        module.weight.mul_(grid.expand((torch.rand(grid.n, generator=draw) < density).float()))
    (found,) = npu.estimate(module, x, block).layers
    weight = module.weight.detach()
    for cost, want in (
        (found.dense, simulate(npu, weight, module, None, pixels)),
        (found.pruned, quickest(npu, weight, module, block, pixels)),
    ):
        assert {name: getattr(cost, name) for name in want if name != "bytes"} == {k: v for k, v in want.items() if k != "bytes"}
    assert found.pruned.latency <= found.dense.latency
    assert found.pruned.mac <= found.pruned.latency
    assert found.imbalance >= 1


# ---- by hand


def test_a_dense_layer_by_hand() -> None:
    # 32 outputs are 2 rows of 16, 24 inputs are 3 columns of 8, 9 kernel positions, 49 pixels
    layer, x = nn.Conv2d(24, 32, 3, padding=1), torch.zeros(2, 24, 7, 7)
    (ideal,) = IDEAL.estimate(layer, x).layers
    assert (ideal.dense.mac, ideal.dense.latency) == (2 * 3 * 9 * 49, 2 * 3 * 9 * 49 + 1)
    (systolic,) = SYSTOLIC.estimate(layer, x).layers
    assert systolic.dense.latency == 2 * 3 * 9 * (49 + 2 * 8 + 16 - 2)
    (real,) = NPU(weight_bandwidth=2, activation_bandwidth=0.5).estimate(layer, x).layers
    assert real.dense.weight_bytes == 24 * 32 * 9
    assert real.dense.weight_cycles == 24 * 32 * 9 // 2 == 3456
    assert real.dense.activation_bytes == (24 + 32) * 49
    assert real.dense.activation_cycles == 5488  # more than 2,646 to multiply: this is what is waited for
    assert real.dense.latency == 5488 + 49 + 1  # the last tile is worked on after its weights arrived, and one cycle to leave
    assert real.dense.waits_for == "activations"


def test_a_pruned_layer_by_hand() -> None:
    layer, x = nn.Linear(32, 48, bias=False), torch.zeros(1, 10, 32)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:16, 8:] = 0  # 1 block left in the first row of 4
        layer.weight[16:32] = 0  # none in the second, all in the third
    (one,) = replace(IDEAL, index_bytes=3).estimate(layer, x).layers
    assert (one.blocks.total, one.blocks.kept) == (12, 5)
    assert (one.dense.latency, one.pruned.latency) == (121, 51)
    assert one.pruned.weight_bytes == 5 * (128 + 3)
    assert one.dense.weight_bytes == 12 * 128  # nothing is skipped, so nothing is indexed
    (two,) = replace(IDEAL, lanes=2).estimate(layer, x).layers
    assert two.dense.compute == 80  # rows of 40 cycles: one lane has two
    assert two.pruned.compute == 40  # 10 and 0 on one, 40 on the other
    assert two.imbalance == pytest.approx(40 / 25)
    assert two.pruned.mac == 25
    assert two.mac_speedup == 60 / 25


def test_blocks_of_another_shape_than_the_array() -> None:
    layer, x = nn.Linear(32, 32, bias=False), torch.zeros(1, 32)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:24, :12] = 0
    # a block of 24x12 is covered by 2 x 2 tiles of 16x8; at the edges are 8x12 (1x2), 24x8 (2x1) and 8x8 (1x1)
    (large,) = IDEAL.estimate(layer, x, (24, 12)).layers
    assert large.pruned.mac == min(2 * 4, 2 * 2 + 2 * 1 + 2 + 2 + 1)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:, 4:] = 0
    # 8 blocks of 4x4 are left, and each has a tile to itself; as many as the dense layer's 2x4
    (small,) = IDEAL.estimate(layer, x, (4, 4)).layers
    assert (small.blocks.kept, small.pruned.mac, small.dense.mac) == (8, 8, 8)
    with torch.no_grad():
        layer.weight[:16] = 0
    (small,) = IDEAL.estimate(layer, x, (4, 4)).layers
    assert small.pruned.mac == 4


def test_an_input_larger_than_the_buffer_is_fetched_again() -> None:
    layer, x = nn.Conv2d(8, 64, 1), torch.zeros(1, 8, 10, 10)
    fits = NPU(activation_bandwidth=1, weight_bandwidth=1, buffer_bytes=800).estimate(layer, x).dense
    assert fits.activation_bytes == 800 + 6400
    assert fits.weight_bytes == 512
    tight = NPU(activation_bandwidth=1, weight_bandwidth=1, buffer_bytes=799).estimate(layer, x).dense
    assert (tight.activation_bytes, tight.weight_bytes) == (7200, 2 * 512)  # two pieces: the weights come twice
    slow = NPU(activation_bandwidth=math.inf, weight_bandwidth=0.1, buffer_bytes=799).estimate(layer, x).dense
    assert (slow.activation_bytes, slow.weight_bytes) == (4 * 800 + 6400, 512)  # weights are dear: the input comes for every row


# ---- the recorded figures of other people's simulators


RECORD = json.loads((ROOT / "records" / "npu-check" / "result.json").read_text())
THEIRS = [row for row in RECORD["rows"] if not row["protocol"].startswith("smartprune")]


def as_layer(case: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    layer = nn.Conv2d(case["inputs"], case["outputs"], case["kernel"], padding=case["kernel"] // 2)
    with torch.no_grad():
        layer.weight.fill_(1)
        for row, kept in enumerate(case["kept"]):
            left = kept
            for into in range(0, case["inputs"], case["columns"]):
                for at in range(case["kernel"] ** 2):
                    if left == 0:
                        outs = slice(row * case["rows"], (row + 1) * case["rows"])
                        layer.weight[outs, into : into + case["columns"], at // case["kernel"], at % case["kernel"]] = 0
                    left = max(0, left - 1)
    return layer, torch.zeros(1, case["inputs"], case["side"], case["side"])


@pytest.mark.parametrize("row", THEIRS, ids=lambda row: f"{row['protocol'].split()[0]}-{row['method']}")
def test_recorded_figures_of_other_simulators(row: dict[str, Any]) -> None:
    case, scalesim = row["case"], row["protocol"].startswith("scalesim")
    npu = replace(SYSTOLIC if scalesim else IDEAL, rows=case["rows"], columns=case["columns"], index_bytes=0)
    npu = replace(npu, weight_bandwidth=case["bandwidth"] or math.inf)
    layer, x = as_layer(case)
    mine = npu.estimate(layer, x).latency
    assert sum(row["answers"]) == row["mean"]
    theirs = row["mean"] + (len(row["answers"]) if scalesim else 0)  # it counts cycles from 0
    few = (
        case["bandwidth"] > 0
        and not case["kept"]
        and case["inputs"] * case["outputs"] * case["kernel"] ** 2 < 10 * npu.macs_per_cycle
    )
    slack = case["side"] ** 2 if few else 0  # with four tiles, ZigZag loads a second one before it starts: the record's note
    assert abs(mine - theirs) <= max(slack, 1e-3 * theirs)


def test_the_record_covers_all_cases() -> None:
    tools = {row["protocol"] for row in THEIRS}
    assert tools == {"zigzag-dse 3.9.1", "scalesim 3.0.0"}
    for tool in tools:
        mine = [row["case"] for row in THEIRS if row["protocol"] == tool]
        assert any(case["kept"] for case in mine)
        assert any(not case["kept"] for case in mine)


# ---- models


def test_calls_and_samples() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    found = IDEAL.estimate(model, torch.zeros(3, 8))
    assert [layer.calls for layer in found.layers] == [2, 1]
    assert [layer.dense.latency for layer in found.layers] == [4, 2]  # twice 1 + 1, then 1 + 1
    tied, x = zoo.tied()
    by_name = {layer.name: layer for layer in IDEAL.estimate(tied, x, (4, 4)).layers}
    assert by_name["a"].calls == 2
    model, x = zoo.transformer_block()
    assert IDEAL.estimate(model, x).to_json() == IDEAL.estimate(model, x[:1]).to_json()
    (attention,) = (layer for layer in IDEAL.estimate(model, x).layers if layer.name == "attention.in_proj_weight")
    assert attention.dense.mac == 3 * 2 * 4  # three parts of 16x16, two tiles each, 4 tokens
    assert attention.dense.activation_bytes == 3 * (16 + 16) * 4


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_calls_agree_with_the_count_of_macs(name: str) -> None:
    model, x = zoo.SMALL[name]()
    found, _ = find_layers(model, Block(4, 4), include="*")
    calls = find_calls(model, found, x)
    total = 0
    for layer in found:
        for call in calls[layer.name]:
            total += sum(part.uses for part in call) * layer.params // len(call)
    assert total == sp.plan(model, (4, 4), include="*", example=x).model_macs


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
@pytest.mark.parametrize("npu", [IDEAL, *PRESETS.values(), NPU(lanes=3, buffer_bytes=64)], ids=str)
def test_every_kind_of_model(name: str, npu: NPU) -> None:
    model, x = zoo.SMALL[name]()
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in find_layers(model, Block(4, 4), include="*")[0]:
            dict(model.named_parameters())[layer.weight].mul_(layer.grid.expand((torch.rand(layer.n) < 0.3).float()))
    found = npu.estimate(model, x, (4, 4))
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert "MAC-only" in shown
    assert found.latency <= found.dense.latency
    assert found.speedup >= 1
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["pruned"]["latency"] == sum(layer["pruned"]["latency"] for layer in data["layers"]) == found.latency
    assert data["ms"] == pytest.approx(found.latency / npu.clock_mhz / 1000)


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
    found = NPU().estimate(model, x, (4, 4), weights=tmp_path / "other.pt")
    assert found.to_json()["layers"] == NPU().estimate(other, x, (4, 4)).to_json()["layers"]
    assert found.where == str(tmp_path / "other.pt")
    with pytest.raises(SmartpruneError, match=r"0.weight is 16x3x3x3 in the model and missing in the state dict"):
        NPU().estimate(model, x, weights={"3.weight": other[3].weight})


def test_default_block_is_the_receipts_or_the_arrays() -> None:
    model, x = zoo.plain_cnn()
    assert NPU(rows=4, columns=2).estimate(model, x).block == Block(4, 2)


def test_share_for_a_time() -> None:
    model, x = zoo.plain_cnn()
    found = NPU(clock_mhz=100).estimate(model, x)
    goal = 0.6 * found.ms
    share = found.share(ms=goal)
    assert (1 - share) * found.dense.latency <= goal * 100_000
    assert float(share) == pytest.approx(0.4)
    assert found.share(ms=10 * found.ms) == 0
    for wrong in (0, -1, math.nan, math.inf, "3", True):
        with pytest.raises(SmartpruneError, match=r"ms=.* must be a number above 0"):
            found.share(ms=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rows": 0}, "rows=0 must be an integer, 1 or more"),
        ({"columns": 2.0}, "columns=2.0 must be an integer"),
        ({"lanes": True}, "lanes=True must be an integer"),
        ({"index_bytes": -1}, "index_bytes=-1 must be an integer, 0 or more"),
        ({"buffer_bytes": 0}, "buffer_bytes=0"),
        ({"dataflow": "row_stationary"}, "it is one of: output_stationary, weight_stationary"),
        ({"weight_bandwidth": 0}, r"weight_bandwidth=0 must be a number above 0, in bytes per cycle"),
        ({"activation_bandwidth": math.nan}, "activation_bandwidth=nan"),
        ({"clock_mhz": math.inf}, "clock_mhz=inf must be a number above 0"),
        ({"clock_mhz": "1 GHz"}, "clock_mhz='1 GHz'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SmartpruneError, match=words):
        NPU(**settings)


def test_wrong_inputs() -> None:
    model, x = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"model is a str; give the torch\.nn\.Module"):
        NPU().estimate("model.safetensors", x)  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match="an example input is needed"):
        NPU().estimate(model, None)
    with pytest.raises(SmartpruneError, match="the model does not run on it"):
        NPU().estimate(model, torch.zeros(1, 5, 8, 8))
    with pytest.raises(SmartpruneError, match="reaches no convolution or linear layer"):
        NPU().estimate(nn.Sequential(nn.ReLU()), x)
    with torch.device("meta"):
        empty = nn.Linear(8, 8)
    with pytest.raises(SmartpruneError, match=r"weight: the weight is on the meta device"):
        NPU().estimate(empty, torch.zeros(1, 8, device="meta"))


def test_presets_and_files(tmp_path: Path) -> None:
    for name, npu in PRESETS.items():
        assert read_npu(name) == npu == getattr(NPU, name)()
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(npu.to_json()))
        assert read_npu(str(path)) == npu
    (tmp_path / "ideal.json").write_text(json.dumps(IDEAL.to_json()))
    assert read_npu(str(tmp_path / "ideal.json")) == IDEAL
    for text, words in (
        ("[]", "is a list; it must be a JSON object"),
        ('{"colour": 1}', "has 'colour'; it must be"),
        ('{"rows": "many"}', "rows='many' must be an integer"),
        ("{", "not readable as JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SmartpruneError, match=words):
            read_npu(str(tmp_path / "bad.json"))
    with pytest.raises(SmartpruneError, match=r"npu 'huge' is not known; there are: small, edge, server; or give a \.json file"):
        read_npu("huge")
    assert NPU.server().macs_per_cycle == 4096
    assert str(NPU(lanes=4)) == "4 lanes of 16x8 MACs, output stationary, 1000 MHz, 16+16 B/cycle"


# ---- the command line


def test_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smartprune.models import MODELS

    path = str(tmp_path / "model.pt")
    torch.save(MODELS["resnet18"]().state_dict(), path)
    assert run_cli("report", path, "--npu", "edge", "--model", "resnet18", "--input", "3x32x32", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["npu"] == NPU.edge().to_json()
    assert data["dense"]["mac"] == data["pruned"]["mac"] == 4_362_304
    for words, message in (
        (["--npu", "edge"], "--npu needs the network of"),
        (["--npu", "edge", "--model", "resnet18"], "--npu needs the shape of one sample"),
        (["--npu", "none", "--model", "resnet18"], "npu 'none' is not known"),
        (["--input", "3x32x32"], "--input is only used with --npu"),
    ):
        assert run_cli("report", path, *words) == 2
        assert message in capsys.readouterr().err


def test_report_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from dataclasses import asdict

    from safetensors.torch import save_file

    from smartprune.training.config import configure, make_task

    config = configure({"sparsity": 0.75, "block": "8x4"})
    task = make_task(config.task, config.task_settings)
    model = task.model(config.model)
    found = sp.plan(model, "8x4", 0.75)
    mask = sp.hard_topk(torch.rand(found.n), found.limit or 0)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for layer in found.layers:
            named[layer.weight].mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    make_receipt(found, named, mask, "random").save(tmp_path / "receipt.json")
    assert run_cli("report", str(tmp_path), "--npu", "small", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["block"] == "8x4x1x1"  # as the receipt says
    assert data["layers"] == json.loads(json.dumps(NPU.small().estimate(model, task.example(), "8x4").to_json()))["layers"]
    assert data["speedup"] > 1


def test_plan_by_cycles(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "resnet18", "--cycles", "0.9", "--input", "3x32x32") == 0
    assert "budget   remove 90% of the NPU cycles: keep at most" in capsys.readouterr().out
    for words, message in (
        (["--cycles", "0.9"], "--cycles needs the shape of one sample"),
        (["--npu", "edge", "--macs", "0.5", "--input", "3x32x32"], "--npu needs a budget of cycles: add --cycles"),
    ):
        assert run_cli("plan", "resnet18", *words) == 2
        assert message in capsys.readouterr().err


def test_plan_of_cycles_that_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is shown with the problem, as for a floor that is too high, and the exit code is that of a failure."""
    words = ("plan", "resnet18", "--cycles", "0.999", "--npu", "small", "--input", "3x32x32")
    assert run_cli(*words) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Blocks of 16x8x1x1"
    assert lines[-2] == "budget   remove 99.9% of the NPU cycles"
    assert lines[-1].startswith("problem  cycles(0.999) cannot be met: ")
    assert run_cli(*words, "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["feasible"] is False
    assert data["problem"].startswith("cycles(0.999) cannot be met")
    assert data["budget"] == {"kind": "cycles", "share": "999/1000"}
    assert data["layers"]


def test_speedup_can_exceed_that_of_the_multiplications() -> None:
    """A dense layer that waits for its weights gains by their absence too, so nothing calls the MACs' ratio a bound."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256))
    grid = Block(4, 4).grid((256, 256))
    with torch.no_grad():
        model[0].weight.mul_(grid.expand((torch.rand(grid.n) > 0.9).float()))
    found = NPU.edge().estimate(model, torch.zeros(1, 256), (4, 4))
    assert found.speedup > found.mac_speedup
    assert found.to_json()["mac_speedup"] == found.mac_speedup
    assert "bound" not in json.dumps(found.to_json())
    assert "bound" not in str(found)


def test_report_and_verify_with_the_network_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smartprune.models import MODELS

    path = str(tmp_path / "model.pt")
    torch.save(MODELS["mobilenetv2"]().state_dict(), path)
    for verb in ("report", "verify"):
        assert run_cli(verb, path, "--block", "16x8", "--json") == 0
        alone = json.loads(capsys.readouterr().out)
        assert run_cli(verb, path, "--block", "16x8", "--model", "mobilenetv2", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert alone["axes_assumed"]
        assert told["axes_assumed"] == []
        assert told["blocks"] != alone["blocks"]  # depthwise convolutions have a row of blocks per channel
        assert run_cli(verb, path, "--block", "16x8", "--model", "resnet18") == 1
        assert "does not belong to the model" in capsys.readouterr().err
        assert run_cli(verb, path, "--block", "16x8", "--model", "nothing") == 2
        assert "unknown model 'nothing'" in capsys.readouterr().err
    page = tmp_path / "page.html"
    assert run_cli("report", path, "--block", "16x8", "--html", str(page)) == 0
    assert "are assumed to be (out, in, ...)" in page.read_text()
    assert run_cli("report", path, "--block", "16x8", "--html", str(page), "--model", "mobilenetv2") == 0
    assert "are assumed to be (out, in, ...)" not in page.read_text()
