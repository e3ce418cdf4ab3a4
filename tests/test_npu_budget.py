"""Budgets in cycles: never exceeded by what the NPU model finds afterwards, and not missed by more than can be helped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smartprune as sp
import zoo
from smartprune import NPU, SmartpruneError
from smartprune.budget import Budget, find_calls
from smartprune.npu_work import Work, line, pruned
from test_npu import IDEAL, MACHINES, SYSTOLIC, layers


def mask_weights(model: nn.Module, plan: sp.Plan, mask: Tensor) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for layer in plan.layers:
            named[layer.weight].mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))


def cycles_of(npu: NPU, model: nn.Module, x: Any, plan: sp.Plan, of: str = "layers") -> tuple[int, int]:
    """Dense and pruned cycles of the layers that are pruned, or of all."""
    names = {layer.name for layer in plan.layers}
    rows = [row for row in npu.estimate(model, x, plan.block).layers if of == "model" or row.name in names]
    return sum(row.dense.latency for row in rows), sum(row.pruned.latency for row in rows)


@given(layers(), MACHINES, st.floats(0, 1), st.fractions(0, Fraction(99, 100)), st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_no_mask_takes_longer_than_its_line_says(case: Any, npu: NPU, density: float, share: Fraction, seed: int) -> None:
    module, x, block, _ = case
    (layer,) = sp.plan(module, block, include="*").layers
    (call,) = find_calls(module, [layer], x)[layer.name]
    work = Work(layer.grid, layer.transposed)
    base, cost = line(npu, work, call, share)
    assert cost.shape == (layer.n,)
    assert int(cost.min()) >= 0
    draw = torch.Generator().manual_seed(seed)
    masks = [torch.rand(layer.n, generator=draw) < p for p in (0.0, density, density, density, 1.0)]
    rows = work.ordered(torch.arange(layer.n))
    masks += [torch.isin(torch.arange(layer.n), rows[0, i].reshape(-1)) for i in range(rows.shape[1])]  # all in one row: one lane
    for mask in masks:
        assert pruned(npu, work, call, mask).latency <= base + int(cost[mask].sum())


@given(
    st.sampled_from(sorted(zoo.SMALL)),
    MACHINES,
    st.sampled_from(["0", "0.1", "0.5", "0.77", "0.9"]),
    st.sampled_from(["layers", "model"]),
    st.sampled_from([(4, 4), (16, 8), (3, 5), (1, None, None), (2, 8, 3)]),
    st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_the_estimate_never_exceeds_the_budget(
    name: str, npu: NPU, share: str, of: str, block: tuple[int | None, ...], seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = zoo.SMALL[name]()
    include = ["*"] if of == "model" else []
    if name in ("transformer_block", "tied") and block == (2, 8, 3):
        block = (2, 8)  # linear layers have no kernel
    try:
        plan = sp.plan(model, block, budget=sp.cycles(float(share), x, npu, of), include=include)  # type: ignore[arg-type]
    except SmartpruneError as error:
        assert "cannot be met" in str(error)  # noqa: PT017
        return
    assert plan.cost is not None
    assert plan.limit is not None
    mask = sp.hard_topk(torch.rand(plan.n), plan.limit, plan.cost)
    kept = int(plan.cost[mask].sum())
    assert kept <= plan.limit
    left = plan.cost[~mask]
    assert left.numel() == 0 or plan.limit - kept < int(left.min())
    mask_weights(model, plan, mask)
    dense, found = cycles_of(npu, model, x, plan, of)
    assert found <= (1 - Fraction(share)) * dense


@pytest.mark.parametrize("npu", [IDEAL, SYSTOLIC], ids=["output", "weight"])
@pytest.mark.parametrize("share", ["0.3", "0.5", "0.77", "0.95"])
@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_without_waiting_it_is_exact_to_a_block(name: str, share: str, npu: NPU) -> None:
    """One lane, no memory to wait for, blocks of the array's shape: a block costs what it takes, and nothing else is lost."""
    torch.manual_seed(0)
    npu = replace(npu, rows=4, columns=4)
    model, x = zoo.SMALL[name]()
    plan = sp.plan(model, (4, 4), budget=sp.cycles(float(share), x, npu))
    assert plan.cost is not None
    assert plan.limit is not None
    mask = sp.hard_topk(torch.rand(plan.n), plan.limit, plan.cost)
    mask_weights(model, plan, mask)
    dense, found = cycles_of(npu, model, x, plan)
    goal = math.floor((1 - Fraction(share)) * dense)
    assert found <= goal
    assert goal - found < int(plan.cost[~mask].min())
    # an independent count: every kept block of every layer takes its tiles, once for each position
    slow = 0
    for layer in plan.layers:
        runs = (plan.uses or {})[layer.name]
        calls = len(layer.sites)
        kept = mask[layer.start : layer.stop].reshape(len(runs), -1).sum(1).tolist()
        slow += sum(n * (count + calls * npu.fold) for n, count in zip(kept, runs, strict=True)) + calls * npu.tail
    assert slow == found


@pytest.mark.parametrize(
    "npu", [NPU(rows=4, columns=4), NPU(rows=4, columns=4, lanes=3), NPU.small()], ids=["one", "lanes", "small"]
)
@pytest.mark.parametrize("method", [sp.Smart(), sp.Magnitude(), sp.Gradual()], ids=lambda m: m.name)
def test_attach_bake_receipt_verify(npu: NPU, method: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    y = torch.randint(0, 10, (x.shape[0],))
    pruner = sp.attach(model, method, block=(4, 4), budget=sp.cycles(0.4, x, npu), steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(4):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    receipt = sp.bake(model)
    dense, found = cycles_of(npu, model, x, pruner.plan)
    assert found <= 0.6 * dense
    asked = receipt.asked
    assert asked is not None
    assert (asked.kind, asked.share, asked.of, asked.limit) == ("cycles", Fraction(2, 5), "layers", pruner.plan.limit)
    assert asked.used == int(pruner.plan.cost[pruner.mask].sum()) <= asked.limit
    assert receipt.met
    shown = str(receipt)
    assert f"asked    cycles 0.4 removed: keep at most {asked.limit:,} of {asked.total:,}" in shown
    assert f"achieved {asked.used:,} kept" in shown
    receipt.save(tmp_path / "receipt.json")
    assert sp.Receipt.load(tmp_path / "receipt.json") == receipt
    assert sp.verify(model, receipt=tmp_path / "receipt.json").ok
    data = json.loads((tmp_path / "receipt.json").read_text())
    data["achieved"]["used"] = asked.limit + 1
    (tmp_path / "receipt.json").write_text(json.dumps(data))
    with pytest.raises(SmartpruneError, match=r"does not agree|does not add up"):
        sp.Receipt.load(tmp_path / "receipt.json")


def test_plan_says_cycles() -> None:
    model, x = zoo.plain_cnn()
    plan = sp.plan(model, (4, 4), budget=sp.cycles(0.5, x, replace(IDEAL, rows=4, columns=4)))
    # 16 -> 20 channels, 3x3, 64 pixels: 5 x 4 x 9 blocks; 20 -> 12, 1x1: 3 x 5; one more cycle each
    total = 64 * (180 + 15)
    assert (plan.unit, plan.total, plan.limit) == ("cycles", total, (total + 2) // 2 - 2)
    assert "keeps at most 6,239 of 12,480 cycles" in str(plan)
    assert str(plan.budget) == "cycles 0.5"
    assert plan.uses is not None  # its example serves the plan as well


def test_nothing_asked_is_nothing_removed() -> None:
    model, x = zoo.plain_cnn()
    for npu in (NPU(), NPU(lanes=4), NPU.server(), NPU(buffer_bytes=16)):
        plan = sp.plan(model, (4, 4), budget=sp.cycles(0, x, npu))
        assert plan.limit == plan.total


def test_layers_that_gain_nothing_keep_their_blocks() -> None:
    """Where moving the activations takes longer than the multiplications, removing blocks saves no time: they are free."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    x = torch.zeros(1, 8, 16, 16)
    npu = NPU(rows=8, columns=8, activation_bandwidth=4, weight_bandwidth=math.inf)
    plan = sp.plan(model, (8, 8), budget=sp.cycles(0.2, x, npu))
    first, second = plan.layers
    assert plan.cost is not None
    assert plan.cost[first.start : first.stop].tolist() == [0]
    assert min(plan.cost[second.start : second.stop].tolist()) > 0


def test_even_lanes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)), torch.zeros(1, 16, 64)
    npu = replace(IDEAL, rows=4, columns=4, lanes=4)
    sure, even = (sp.plan(model, (4, 4), budget=sp.cycles(0.5, x, npu, even=e)) for e in (False, True))
    kept = []
    for plan in (sure, even):
        assert plan.limit is not None
        kept.append(int(sp.hard_topk(torch.rand(plan.n), plan.limit, plan.cost).sum()))
    assert kept[0] < kept[1]
    assert kept[1] == pytest.approx(plan.n / 2, rel=0.01)


def test_to_a_latency() -> None:
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    npu = NPU(rows=4, columns=4, clock_mhz=10, activation_bandwidth=64, weight_bandwidth=64)
    before = npu.estimate(model, x, (4, 4))
    goal = round(0.8 * before.ms, 6)
    plan = sp.plan(model, (4, 4), budget=sp.cycles(before.share(ms=goal), x, npu, of="model"))
    assert plan.limit is not None
    mask_weights(model, plan, sp.hard_topk(torch.rand(plan.n), plan.limit, plan.cost))
    assert 0.9 * goal < npu.estimate(model, x, (4, 4)).ms <= goal


def test_wrong_budgets() -> None:
    model, x = zoo.plain_cnn()
    with pytest.raises(SmartpruneError, match=r"npu is a str; give an NPU"):
        sp.cycles(0.5, x, "edge")  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match=r"of='all'; it is 'layers'"):
        sp.cycles(0.5, x, NPU(), of="all")  # type: ignore[arg-type]
    with pytest.raises(SmartpruneError, match=r"cycles=50 is outside \[0, 1\): it is the share to remove; write cycles=0.5"):
        sp.cycles(50, x, NPU())
    with pytest.raises(SmartpruneError, match="an example input is needed"):
        sp.plan(model, (4, 4), budget=sp.cycles(0.5, None, NPU()))
    slow = NPU(rows=4, columns=4, activation_bandwidth=2)
    with pytest.raises(SmartpruneError, match=r"cycles\(0.9\) cannot be met: .*moved activations\); at most about 0\.\d+ can"):
        sp.plan(model, (4, 4), budget=sp.cycles(0.9, x, slow))
    with pytest.raises(SmartpruneError, match=r"cycles\(0.9, of='model'\) cannot be met: .* layers that are not pruned"):
        sp.plan(model, (4, 4), budget=sp.cycles(0.9, x, NPU(), of="model"))

    with pytest.raises(SmartpruneError, match="there is no NPU whose cycles they are"):
        sp.plan(model, (4, 4), budget=Budget("cycles", Fraction(1, 2), x))

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(SmartpruneError, match="reaches none of the layers"):
        sp.plan(Idle(), (4, 4), budget=sp.cycles(0.5, x, NPU()))


def test_what_is_said_to_be_possible_is() -> None:
    model, x = zoo.plain_cnn()
    slow = NPU(rows=4, columns=4, activation_bandwidth=8)
    with pytest.raises(SmartpruneError, match="at most about") as caught:
        sp.plan(model, (4, 4), budget=sp.cycles(0.999, x, slow))
    most = float(str(caught.value).partition("at most about ")[2].split()[0])
    assert 0 < most < 0.999
    assert sp.plan(model, (4, 4), budget=sp.cycles(most - 0.001, x, slow)).limit is not None
    with pytest.raises(SmartpruneError, match="cannot be met"):
        sp.plan(model, (4, 4), budget=sp.cycles(min(0.9989, most + 0.001), x, slow))
