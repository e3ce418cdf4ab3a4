"""Budgets in cycles: the estimate of the pruned model never exceeds them, and uses them as far as whole blocks allow."""

from __future__ import annotations

import json
import math
import re
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
from helpers import zoo
from helpers.npus import IDEAL, MACHINES, SYSTOLIC
from smartprune import NPU, SmartpruneError
from smartprune.core.budget import describe


def mask_weights(model: nn.Module, plan: sp.Plan, mask: Tensor) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for layer in plan.layers:
            named[layer.weight].mul_(layer.grid.expand(mask[layer.start : layer.stop].float()))


def cycles_of(npu: NPU, model: nn.Module, x: Any, plan: sp.Plan, of: str = "layers") -> tuple[int, int]:
    """Dense and pruned cycles of the pruned layers, or of all layers."""
    names = {layer.name for layer in plan.layers}
    rows = [row for row in npu.estimate(model, x, plan.block).layers if of == "model" or row.name in names]
    return sum(row.dense.latency for row in rows), sum(row.pruned.latency for row in rows)


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
    if name in ("transformer_block", "tied", "cross_attention") and block == (2, 8, 3):
        block = (2, 8)  # linear layers have no kernel
    try:
        plan = sp.plan(model, block, budget=sp.cycles(float(share), x, npu, of), include=include)  # type: ignore[arg-type]
    except SmartpruneError as error:
        assert "cannot be met" in str(error)  # noqa: PT017
        return
    assert plan.exact is not None
    rank = torch.rand(plan.n)
    mask = plan.exact.best(rank)
    assert mask is not None
    dense_state = {name: weight.clone() for name, weight in model.state_dict().items()}
    mask_weights(model, plan, mask)
    dense, pruned = cycles_of(npu, model, x, plan, of)
    skipped = plan.exact.total - dense  # linear layers, which an estimate skips if the block has a kernel
    assert skipped == 0 or (skipped > 0 and of == "model" and len(block) == 3)
    assert plan.bound == (math.floor((1 - Fraction(share)) * (dense + skipped)), dense + skipped)
    assert pruned + skipped == plan.exact.of(mask) <= plan.exact.limit
    if not mask.all():  # one more block exceeds the budget
        assert float(rank[mask].min() if mask.any() else 1) >= float(rank[~mask].max())
        mask[rank.masked_fill(mask, -1).argmax()] = True
        model.load_state_dict(dense_state)
        mask_weights(model, plan, mask)
        assert cycles_of(npu, model, x, plan, of)[1] + skipped > plan.exact.limit


@pytest.mark.parametrize("npu", [IDEAL, SYSTOLIC], ids=["output", "weight"])
@pytest.mark.parametrize("share", ["0.3", "0.5", "0.77", "0.95"])
@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_cycles_are_exact_to_a_block_with_free_memory(name: str, share: str, npu: NPU) -> None:
    """With one lane, unlimited bandwidth and blocks of the array's shape, the cost of a block is exactly its cycles."""
    torch.manual_seed(0)
    npu = replace(npu, rows=4, columns=4)
    model, x = zoo.SMALL[name]()
    plan = sp.plan(model, (4, 4), budget=sp.cycles(float(share), x, npu))
    assert plan.cost is not None
    assert plan.limit is not None
    mask = sp.hard_topk(torch.rand(plan.n), plan.limit, plan.cost)  # with the sum of costs that a search uses
    mask_weights(model, plan, mask)
    dense, pruned = cycles_of(npu, model, x, plan)
    goal = math.floor((1 - Fraction(share)) * dense)
    assert pruned <= goal
    assert goal - pruned < int(plan.cost[~mask].min())
    # an independent count: a kept block takes one cycle per use, plus the overhead of the array
    expected = 0
    for layer in plan.layers:
        runs = (plan.uses or {})[layer.name]
        calls = len(layer.sites)
        kept = mask[layer.start : layer.stop].reshape(len(runs), -1).sum(1).tolist()
        expected += sum(n * (count + calls * npu.fold) for n, count in zip(kept, runs, strict=True)) + calls * npu.tail
    assert expected == pruned


@pytest.mark.parametrize(
    "npu", [NPU(rows=4, columns=4), NPU(rows=4, columns=4, lanes=3), NPU.small()], ids=["one", "lanes", "small"]
)
@pytest.mark.parametrize("method", [sp.Smart(), sp.Magnitude(), sp.Gradual()], ids=lambda m: m.name)
def test_attach_and_bake_meet_the_budget_and_record_it(npu: NPU, method: Any, tmp_path: Path) -> None:
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
    dense, pruned = cycles_of(npu, model, x, pruner.plan)
    assert pruned <= 0.6 * dense
    requested = receipt.requested
    assert requested is not None
    assert (requested.kind, requested.share, requested.of) == ("cycles", Fraction(2, 5), "layers")
    assert (requested.total, requested.limit) == (dense, math.floor(Fraction(3, 5) * dense))
    assert requested.used == pruned <= requested.limit
    assert receipt.met
    assert NPU.from_json(requested.npu, "receipt") == npu
    printed = str(receipt)
    assert f"npu      rows={npu.rows}, columns={npu.columns}, lanes={npu.lanes}, dataflow=output_stationary" in printed
    assert f"budget   remove 40% of the NPU cycles: keep at most {requested.limit:,} of {requested.total:,}" in printed
    assert f"kept     {requested.used:,} cycles\n" in printed
    receipt.save(tmp_path / "receipt.json")
    assert sp.Receipt.load(tmp_path / "receipt.json") == receipt
    assert sp.verify(model, receipt=tmp_path / "receipt.json").ok
    data = json.loads((tmp_path / "receipt.json").read_text())
    data["achieved"]["used"] = requested.limit + 1
    (tmp_path / "receipt.json").write_text(json.dumps(data))
    with pytest.raises(SmartpruneError, match=r"does not agree|does not add up"):
        sp.Receipt.load(tmp_path / "receipt.json")
    damages: list[tuple[Any, str]] = [
        (7, "npu is 7; it must be a dictionary"),
        ({"rows": [1]}, "rows is a list of 1; it must be a number"),
        ({"rows": "\x1b[2J"}, "printable"),
        ({"\x1b": 1}, "short names"),
        ({f"field_{i}": i for i in range(99)}, "at most 32 fields"),
    ]
    for damage, message in damages:
        data = receipt.to_json()
        data["asked"]["npu"] = damage  # type: ignore[index]
        with pytest.raises(SmartpruneError, match=rf"asked: .*{message}"):
            sp.Receipt.from_json(data)


@pytest.mark.parametrize(
    ("fields", "message"), [({"rows": 0}, "rows=0 must be an integer"), ({"x": 1}, "has 'x'"), (7, "is a int")]
)
def test_an_npu_checks_the_fields_of_a_receipt(fields: object, message: str) -> None:
    with pytest.raises(SmartpruneError, match=rf"asked: npu: .*{message}"):
        NPU.from_json(fields, "asked: npu")


def test_a_plan_prints_its_cycles() -> None:
    model, x = zoo.plain_cnn()
    plan = sp.plan(model, (4, 4), budget=sp.cycles(0.5, x, replace(IDEAL, rows=4, columns=4)))
    # 16 -> 20 channels, 3x3, 64 pixels: 5 x 4 x 9 blocks; 20 -> 12, 1x1: 3 x 5; one more cycle each
    total = 64 * (180 + 15)
    assert (plan.unit, plan.total, plan.limit) == ("cycles", total, (total + 2) // 2 - 2)  # the limit of the search
    assert plan.bound == ((total + 2) // 2, total + 2)
    assert "remove 50% of the NPU cycles: keep at most 6,241 of 12,482 cycles" in str(plan)
    assert describe(plan.budget) == "cycles 0.5"
    assert plan.uses is not None  # the plan takes the example of the budget


def test_a_share_of_zero_removes_nothing() -> None:
    model, x = zoo.plain_cnn()
    for npu in (NPU(), NPU(lanes=4), NPU.server(), NPU(buffer_bytes=16)):
        plan = sp.plan(model, (4, 4), budget=sp.cycles(0, x, npu))
        assert plan.limit == plan.total


def test_blocks_of_memory_bound_layers_cost_nothing() -> None:
    """If moving the activations takes longer than multiplying, removing blocks saves no time, so they cost nothing."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1))
    x = torch.zeros(1, 8, 16, 16)
    npu = NPU(rows=8, columns=8, activation_bandwidth=4, weight_bandwidth=math.inf)
    plan = sp.plan(model, (8, 8), budget=sp.cycles(0.2, x, npu))
    first, second = plan.layers
    assert plan.cost is not None
    assert plan.cost[first.start : first.stop].tolist() == [0]
    assert min(plan.cost[second.start : second.stop].tolist()) > 0


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_several_lanes_stay_within_the_budget(lanes: int) -> None:
    """For random masks, the sum of costs that a search uses is close to the latency."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)), torch.zeros(1, 16, 64)
    plan = sp.plan(model, (4, 4), budget=sp.cycles(0.5, x, replace(IDEAL, rows=4, columns=4, lanes=lanes)))
    assert plan.exact is not None
    assert plan.limit is not None
    rank = torch.rand(plan.n)
    search_mask, exact_mask = sp.hard_topk(rank, plan.limit, plan.cost), plan.exact.best(rank)
    assert exact_mask is not None
    assert int(search_mask.sum()) == pytest.approx(plan.n / 2, rel=0.02)
    assert int(exact_mask.sum()) == pytest.approx(plan.n / 2, rel=0.15)  # includes the random imbalance of lanes


def test_a_floor_is_kept_or_refused() -> None:
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    npu = NPU(rows=4, columns=4, lanes=2, activation_bandwidth=math.inf)
    pruner = sp.attach(model, sp.Magnitude(), block=(4, 4), budget=sp.cycles(0.6, x, npu), floor=0.2, steps=1)
    pruner.freeze()
    for layer in pruner.plan.layers:
        assert int(pruner.mask[layer.start : layer.stop].sum()) >= math.ceil(0.2 * layer.n)
    dense, pruned = cycles_of(npu, model, x, pruner.plan)
    assert pruned <= 0.4 * dense
    plan = sp.plan(zoo.plain_cnn()[0], (4, 4), budget=sp.cycles(0.6, x, npu), floor=0.5)
    assert plan.problem is not None
    assert re.fullmatch(r"floor=0.5 needs [\d,]+ cycles, the budget keeps [\d,]+", plan.problem)
    with pytest.raises(SmartpruneError, match=r"lower floor, or remove less: at most 0\.\d+ of the cycles can be removed"):
        plan.require()


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 6), nn.Conv1d(4, 4, 2), nn.ConvTranspose1d(4, 4, 2)], ids=["linear", "conv", "transposed"]
)
def test_a_floor_is_refused_only_if_no_mask_meets_it(layer: nn.Module, lanes: int) -> None:
    """Compared with all masks. Rows of blocks run in parallel, blocks of one row do not. Accepted floors are met."""
    npu = NPU(rows=2, columns=2, lanes=lanes, weight_bandwidth=math.inf, activation_bandwidth=math.inf)
    model, x = nn.Sequential(layer), torch.zeros(1, 6, 6) if isinstance(layer, nn.Linear) else torch.zeros(1, 4, 9)
    for floor in (0.25, 0.34, 0.5):
        for share in (0.1, 0.3, 0.5):
            plan = sp.plan(model, (2, 2), budget=sp.cycles(share, x, npu), floor=floor, include="*")
            assert plan.exact is not None
            masks = [torch.tensor([bool(i >> bit & 1) for bit in range(plan.n)]) for i in range(2**plan.n)]
            count = math.ceil(Fraction(str(floor)) * plan.n)
            assert plan.feasible == any(plan.exact.of(mask) <= plan.exact.limit for mask in masks if int(mask.sum()) >= count)
            for rank in torch.rand(5, plan.n) if plan.feasible else ():
                mask = plan.exact.best(rank, plan.min_keep, torch.zeros(plan.n, dtype=torch.long))
                assert mask is not None
                assert int(mask.sum()) >= count
                assert plan.exact.of(mask) <= plan.exact.limit


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_floor_is_met_by_partial_blocks(lanes: int) -> None:
    """Partial blocks have fewer weights to fetch."""
    npu = NPU(rows=2, columns=2, lanes=lanes, weight_bandwidth=0.5, activation_bandwidth=1)
    plan = sp.plan(nn.Sequential(nn.Linear(5, 5)), (2, 2), budget=sp.cycles(0.3, torch.zeros(1, 3, 5), npu), include="*")
    assert plan.exact is not None
    masks = [torch.tensor([bool(i >> bit & 1) for bit in range(plan.n)]) for i in range(2**plan.n)]
    for count in range(1, 5):
        least = min(plan.exact.of(mask) for mask in masks if int(mask.sum()) >= count)
        assert plan.exact.of(plan.exact.cheapest(torch.tensor([count]))) == least


@pytest.mark.parametrize("method", [sp.Magnitude(), sp.Gradual(), sp.Pdp(allocation="global_once")], ids=lambda m: m.name)
def test_a_floor_that_the_latency_allows_is_feasible_in_a_search(method: Any) -> None:
    """With a low weight bandwidth and an index per block, the costs that a search uses exceed the latency."""
    torch.manual_seed(0)
    npu = NPU(rows=2, columns=2, weight_bandwidth=1, activation_bandwidth=1)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 6, 3, padding=1))
    x = torch.randn(1, 4, 3, 5)
    budget = sp.cycles(0.7, x, npu)
    assert sp.plan(model, (4, 4), budget=budget, floor=0.2, include="*").feasible
    pruner = sp.attach(model, method, block=(4, 4), budget=budget, floor=0.2, include="*", steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        pruner.step()
    assert sp.bake(model).met
    for layer in pruner.plan.layers:
        assert int(pruner.mask[layer.start : layer.stop].sum()) >= math.ceil(0.2 * layer.n)


def test_pruning_to_a_latency_in_milliseconds() -> None:
    torch.manual_seed(0)
    model, x = zoo.plain_cnn()
    npu = NPU(rows=4, columns=4, clock_mhz=10, activation_bandwidth=64, weight_bandwidth=64)
    before = npu.estimate(model, x, (4, 4))
    goal = round(0.8 * before.ms, 6)
    plan = sp.plan(model, (4, 4), budget=sp.cycles(before.share(ms=goal), x, npu, of="model"))
    assert plan.exact is not None
    mask = plan.exact.best(torch.rand(plan.n))
    assert mask is not None
    mask_weights(model, plan, mask)
    assert 0.99 * goal < npu.estimate(model, x, (4, 4)).ms <= goal


def test_wrong_budgets_raise() -> None:
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

    with pytest.raises(SmartpruneError, match="npu is a NoneType; give an NPU"):
        sp.cycles(0.5, x, None)  # type: ignore[arg-type]

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(SmartpruneError, match=r"nothing to prune .*inference on the example never uses it"):
        sp.plan(Idle(), (4, 4), budget=sp.cycles(0.5, x, NPU()))
    with pytest.raises(SmartpruneError, match="reaches none of the layers"):
        sp.plan(Idle(), (4, 4), budget=sp.cycles(0.5, x, NPU()), include="*")


def test_the_suggested_share_is_feasible() -> None:
    model, x = zoo.plain_cnn()
    slow = NPU(rows=4, columns=4, activation_bandwidth=8)
    with pytest.raises(SmartpruneError, match="at most about") as caught:
        sp.plan(model, (4, 4), budget=sp.cycles(0.999, x, slow))
    suggested = float(str(caught.value).partition("at most about ")[2].split()[0])
    assert 0 < suggested < 0.999
    assert sp.plan(model, (4, 4), budget=sp.cycles(suggested - 0.001, x, slow)).limit is not None
    with pytest.raises(SmartpruneError, match="cannot be met"):
        sp.plan(model, (4, 4), budget=sp.cycles(min(0.9989, suggested + 0.001), x, slow))


@pytest.mark.parametrize("of", ["layers", "model"])
def test_the_suggested_share_keeps_a_block(of: str) -> None:
    """The suggested share leaves room for layers that wait for activations and layers that are not pruned."""
    npu = NPU(rows=2, columns=2, lanes=2, dataflow="weight_stationary", weight_bandwidth=4, activation_bandwidth=16)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), torch.zeros(1, 50, 6)
    options: dict[str, Any] = {"include": "*"} if of == "layers" else {"include": "0", "skip": "1"}
    suggestions = 0
    for percent in range(50, 100):
        try:
            sp.plan(model, (2, 2), budget=sp.cycles(percent / 100, x, npu, of), **options).require()  # type: ignore[arg-type]
        except SmartpruneError as error:
            match = re.search(
                r"keeps [\d,]+ of ([\d,]+) cycles, of which .* at most (0\.\d+) of the cycles can be removed", str(error)
            )
            if match is not None:
                suggestions += 1
                suggested = float(match[2])
                assert suggested < percent / 100
                plan = sp.plan(model, (2, 2), budget=sp.cycles(suggested, x, npu, of), **options)  # type: ignore[arg-type]
                assert plan.feasible
                assert f"{plan.bound[1]:,}" == match[1]
    assert suggestions
