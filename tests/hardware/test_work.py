"""The cost of a layer on an NPU, compared with a simulation that visits every tile, and with costs worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.npus import IDEAL, MACHINES, SYSTOLIC
from smartprune import NPU
from smartprune.core.block import Block
from smartprune.core.layers import find_layers

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
