"""The NPU model compared with a loop-based simulation, hand-computed examples and recorded results of two public simulators."""

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


# ---- a simulation with loops over blocks, tiles, pixels and cycles, which shares no code with the model


def collect_blocks(weight: Tensor, module: nn.Module, block: tuple[int, ...]) -> dict[int, list[dict[str, Any]]]:
    """The blocks of every row of outputs and their contents, collected element by element."""
    transposed, groups = isinstance(module, nn.ConvTranspose2d), getattr(module, "groups", 1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    if not transposed:
        inputs, outputs = weight.shape[1], weight.shape[0] // groups
    blocks: dict[tuple[int, ...], dict[str, Any]] = {}
    for index, value in zip(
        torch.cartesian_prod(*map(torch.arange, weight.shape)).tolist(), weight.reshape(-1).tolist(), strict=True
    ):
        first, second, kernel = index[0], index[1], tuple(index[2:])
        if transposed:
            part, inp, out = first // inputs, first % inputs, second
        else:
            part, out, inp = first // outputs, first % outputs, second
        kernel_step = tuple(k // s for k, s in zip(kernel, block[2:], strict=False))
        position = (part, out // block[0], inp // block[1], *kernel_step)
        entry = blocks.setdefault(position, {"outs": set(), "ins": set(), "kernel": set(), "elements": 0, "live": False})
        entry["outs"].add(out)
        entry["ins"].add(inp)
        entry["kernel"].add(kernel)
        entry["elements"] += 1
        entry["live"] |= value != 0
    rows: dict[int, list[dict[str, Any]]] = {}
    steps = 1 + max(position[1] for position in blocks)
    for position, entry in sorted(blocks.items()):
        rows.setdefault(position[0] * steps + position[1], []).append({**entry, "part": position[0]})
    return rows


def run_lanes(npu: NPU, queue: list[int]) -> int:
    """The cycles until all rows are done, simulated cycle by cycle. An idle lane takes the next row."""
    remaining, waiting, cycle = [0] * npu.lanes, list(queue), 0
    while True:
        for lane in range(npu.lanes):
            while remaining[lane] == 0 and waiting:
                remaining[lane] = waiting.pop(0)
        if not any(remaining):
            return cycle
        remaining = [max(0, n - 1) for n in remaining]
        cycle += 1


def tiles_of(npu: NPU, entry: dict[str, Any]) -> int:
    count = 0
    for _ in range(0, len(entry["outs"]), npu.rows):
        for _ in range(0, len(entry["ins"]), npu.columns):
            for _ in entry["kernel"]:
                count += 1
    return count


def fetch_per_row(npu: NPU, rows: dict[int, list[dict[str, Any]]], parts: int) -> int:
    """How many inputs are fetched if every row of tiles fetches its own. Rows that run in parallel share them."""
    fetched = 0
    for part in range(parts):
        part_rows = [row for row in rows.values() if row[0]["part"] == part]
        live_inputs = [{inp for entry in row if entry["live"] for inp in entry["ins"]} for row in part_rows]
        for first in range(0, len(part_rows), npu.lanes):
            parallel = part_rows[first : first + npu.lanes]
            for _ in range(0, max(len(row[0]["outs"]) for row in parallel), npu.rows):
                fetched += len(set().union(*live_inputs[first : first + npu.lanes]))
    return fetched


def simulate(
    npu: NPU, weight: Tensor, module: nn.Module, block: tuple[int, ...] | None, pixels: tuple[int, int, int]
) -> dict[str, int]:
    """The cost of one call of the layer with its nonzero blocks only, or dense if ``block`` is None."""
    uses, reads, writes = pixels
    skips = block is not None
    if block is None:  # tiles of the array's shape
        weight, block = torch.ones_like(weight), (npu.rows, npu.columns, *([10**6] * (weight.dim() - 2)))
    rows = collect_blocks(weight, module, block)
    live = {row: [entry for entry in entries if entry["live"]] for row, entries in rows.items()}
    parts = 1 + max(entry["part"] for row in rows.values() for entry in row)
    outputs = len({(entry["part"], out) for row in rows.values() for entry in row for out in entry["outs"]})
    needed = {(entry["part"], inp) for row in live.values() for entry in row for inp in entry["ins"]}
    bits = sum(
        npu.weight_bits * entry["elements"] + (8 * npu.index_bytes if skips else 0) for row in live.values() for entry in row
    )
    pieces = max(1, math.ceil(npu.activation_bits * reads * len(needed) / (8 * npu.buffer_bytes)))
    orders = [(1, False)] if pieces == 1 else [(1, True), (pieces, False)]
    costs = []
    for passes, refetch in orders:
        queue, mac = [], 0
        for entries in live.values():
            cycles = 0
            for entry in entries:
                for _ in range(tiles_of(npu, entry)):
                    cycles += passes * npu.fold
                    for _ in range(uses):
                        cycles += 1
                        mac += 1
            queue.append(cycles)
        fetched = fetch_per_row(npu, rows, parts) if refetch else len(needed)
        moved = npu.activation_bits * (reads * fetched + writes * outputs)
        compute = run_lanes(npu, queue)
        weight_cycles = 0 if math.isinf(npu.weight_bandwidth) else math.ceil(bits * passes / (8 * npu.weight_bandwidth))
        activation_cycles = 0 if math.isinf(npu.activation_bandwidth) else math.ceil(moved / (8 * npu.activation_bandwidth))
        first = min(npu.rows, outputs // parts) * min(npu.columns, weight.numel() // outputs // math.prod(weight.shape[2:]))
        load = 0 if math.isinf(npu.weight_bandwidth) else math.ceil(npu.weight_bits * first / (8 * npu.weight_bandwidth))
        lead = min(load, uses + npu.fold) if mac else 0
        costs.append(
            {
                "latency": max(compute, weight_cycles, activation_cycles) + lead + (npu.dataflow == "output_stationary"),
                "bytes": math.ceil(bits * passes / 8) + math.ceil(moved / 8),
                "mac": math.ceil(mac / npu.lanes),
                "busy": sum(queue),
                "compute": compute,
                "weight_bytes": math.ceil(bits * passes / 8),
                "activation_bytes": math.ceil(moved / 8),
                "weight_cycles": weight_cycles,
                "activation_cycles": activation_cycles,
            }
        )
    return min(costs, key=lambda cost: (cost["latency"], cost["bytes"]))


def simulate_pruned(
    npu: NPU, weight: Tensor, module: nn.Module, block: tuple[int, ...], pixels: tuple[int, int, int]
) -> dict[str, int]:
    """The cost of the pruned layer, which runs dense if that is faster."""
    costs = [simulate(npu, weight, module, b, pixels) for b in (block, None)]
    return min(costs, key=lambda cost: (cost["latency"], cost["bytes"]))


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor, tuple[int, ...], tuple[int, int, int]]:
    """A layer, an input, a block, and (uses, reads, writes) computed by hand."""
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
def test_costs_match_a_simulation(case: Any, npu: NPU, density: float, seed: int) -> None:
    module, x, block, pixels = case
    generator = torch.Generator().manual_seed(seed)
    grid = find_layers(module, Block(*block), include="*")[0][0].grid
    with torch.no_grad():
        module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.1)
        module.weight.mul_(grid.expand((torch.rand(grid.n, generator=generator) < density).float()))
    (layer,) = npu.estimate(module, x, block).layers
    weight = module.weight.detach()
    for cost, expected in (
        (layer.dense, simulate(npu, weight, module, None, pixels)),
        (layer.pruned, simulate_pruned(npu, weight, module, block, pixels)),
    ):
        assert {name: getattr(cost, name) for name in expected if name != "bytes"} == {
            k: v for k, v in expected.items() if k != "bytes"
        }
    assert layer.pruned.latency <= layer.dense.latency
    assert layer.pruned.mac <= layer.pruned.latency
    assert layer.imbalance >= 1


# ---- examples computed by hand


def test_cycles_of_a_dense_layer() -> None:
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
    assert real.dense.activation_cycles == 5488  # more than the 2,646 cycles of the multiplications
    assert real.dense.latency == 5488 + 49 + 1  # plus the last tile after its weights arrived, and one cycle to write
    assert real.dense.waits_for == "activations"


def test_cycles_of_a_pruned_layer() -> None:
    layer, x = nn.Linear(32, 48, bias=False), torch.zeros(1, 10, 32)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:16, 8:] = 0  # the first row keeps 1 of 4 blocks
        layer.weight[16:32] = 0  # the second row keeps none, the third all
    (one,) = replace(IDEAL, index_bytes=3).estimate(layer, x).layers
    assert (one.blocks.total, one.blocks.kept) == (12, 5)
    assert (one.dense.latency, one.pruned.latency) == (121, 51)
    assert one.pruned.weight_bytes == 5 * (128 + 3)
    assert one.dense.weight_bytes == 12 * 128  # dense layers have no indices
    (two,) = replace(IDEAL, lanes=2).estimate(layer, x).layers
    assert two.dense.compute == 80  # rows of 40 cycles; one lane has two of them
    assert two.pruned.compute == 40  # 10 and 0 cycles on one lane, 40 on the other
    assert two.imbalance == pytest.approx(40 / 25)
    assert two.pruned.mac == 25
    assert two.mac_speedup == 60 / 25


def test_blocks_may_differ_from_the_shape_of_the_array() -> None:
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
    # 8 blocks of 4x4 are left, one tile each, as many as the 2x4 tiles of the dense layer
    (small,) = IDEAL.estimate(layer, x, (4, 4)).layers
    assert (small.blocks.kept, small.pruned.mac, small.dense.mac) == (8, 8, 8)
    with torch.no_grad():
        layer.weight[:16] = 0
    (small,) = IDEAL.estimate(layer, x, (4, 4)).layers
    assert small.pruned.mac == 4


def test_an_input_larger_than_the_buffer_is_fetched_repeatedly() -> None:
    layer, x = nn.Conv2d(8, 64, 1), torch.zeros(1, 8, 10, 10)
    fits = NPU(activation_bandwidth=1, weight_bandwidth=1, buffer_bytes=800).estimate(layer, x).dense
    assert fits.activation_bytes == 800 + 6400
    assert fits.weight_bytes == 512
    tight = NPU(activation_bandwidth=1, weight_bandwidth=1, buffer_bytes=799).estimate(layer, x).dense
    assert (tight.activation_bytes, tight.weight_bytes) == (7200, 2 * 512)  # two pieces, so weights are fetched twice
    slow = NPU(activation_bandwidth=math.inf, weight_bandwidth=0.1, buffer_bytes=799).estimate(layer, x).dense
    assert (slow.activation_bytes, slow.weight_bytes) == (
        4 * 800 + 6400,
        512,
    )  # slow weights, so the input is fetched for every row


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
    assert total == sp.plan(model, (4, 4), include="*", example=x).model_macs


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
    assert NPU(rows=4, columns=2).estimate(model, x).block == Block(4, 2)


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


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_wrong_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=message):
        NPU(**settings)


def test_wrong_inputs_raise() -> None:
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


def test_presets_and_files_are_read(tmp_path: Path) -> None:
    for name, npu in PRESETS.items():
        assert read_npu(name) == npu == getattr(NPU, name)()
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(npu.to_json()))
        assert read_npu(str(path)) == npu
    (tmp_path / "ideal.json").write_text(json.dumps(IDEAL.to_json()))
    assert read_npu(str(tmp_path / "ideal.json")) == IDEAL
    for text, message in (
        ("[]", "is a list; it must be a JSON object"),
        ('{"colour": 1}', "has 'colour'; it must be"),
        ('{"rows": "many"}', "rows='many' must be an integer"),
        ("{", "not readable as JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SmartpruneError, match=message):
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
    for arguments, message in (
        (["--cycles", "0.9"], "--cycles needs the shape of one sample"),
        (["--npu", "edge", "--macs", "0.5", "--input", "3x32x32"], "--npu needs a budget of cycles: add --cycles"),
    ):
        assert run_cli("plan", "resnet18", *arguments) == 2
        assert message in capsys.readouterr().err


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
