"""What a plan expects, against loops over single weights, and against the model after those blocks are really removed."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.errors import SmartpruneError
from smartprune.pruning.expected import Expected


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 7, 1)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(7, 3))


X = torch.zeros(1, 3, 8, 8)
POSITIONS = 64  # outputs of every convolution


def blocks_of(model: nn.Sequential, out: int, inn: int) -> dict[tuple[int, int, int, int, int], list[float]]:
    """The absolute weights of every block of the second and the third convolution, element by element."""
    blocks: dict[tuple[int, int, int, int, int], list[float]] = {}
    for layer in (2, 4):
        weight = model[layer].weight.detach()
        for o in range(weight.shape[0]):
            for i in range(weight.shape[1]):
                for y in range(weight.shape[2]):
                    for x in range(weight.shape[3]):
                        blocks.setdefault((layer, o // out, i // inn, y, x), []).append(abs(float(weight[o, i, y, x])))
    return blocks


def expected_of(model: nn.Module, *args: object, **options: object) -> Expected:
    expected = sp.plan(model, *args, **options).expected  # type: ignore[arg-type]
    assert expected is not None
    return expected


@pytest.mark.parametrize("sparsity", [0.3, 0.8])
def test_macs_and_blocks_agree_with_a_loop_over_single_weights(sparsity: float) -> None:
    model = network()
    blocks = blocks_of(model, 4, 4)
    keep = math.ceil(round((1 - sparsity) * len(blocks), 9))
    largest = sorted(blocks, key=lambda key: -sum(blocks[key]) / len(blocks[key]))[:keep]
    fixed = POSITIONS * 6 * 3 * 9 + 7 * 3
    dense = POSITIONS * (10 * 6 * 9 + 7 * 10)
    expected = expected_of(model, (4, 4), sparsity, example=X)
    assert expected.kept == {"2": sum(key[0] == 2 for key in largest), "4": sum(key[0] == 4 for key in largest)}
    assert expected.macs is not None
    assert (expected.macs.total, expected.macs.kept) == (
        fixed + dense,
        fixed + POSITIONS * sum(len(blocks[key]) for key in largest),
    )
    assert expected.even_macs == fixed + round((1 - sparsity) * dense)


def test_size_and_cycles_are_those_of_the_model_after_these_blocks_are_removed(tmp_path: object) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    npu = sp.NPU.small()
    expected = expected_of(model, (4, 4), 0.7, example=X, npu=npu)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.7, steps=1, example=X).freeze()
    sp.bake(model)
    packed = sp.pack(model, f"{tmp_path}/a.packed.safetensors", block=(4, 4))
    estimate = npu.estimate(model, X, (4, 4))
    assert expected.bytes is not None
    assert expected.cycles is not None
    assert (expected.bytes.total, expected.bytes.kept) == (packed.dense, packed.size)
    assert (expected.cycles.total, expected.cycles.kept, expected.npu) == (estimate.dense.latency, estimate.latency, npu)


def test_tied_weights_lose_their_blocks_under_every_name(tmp_path: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    model[4].weight = model[2].weight
    expected = expected_of(model, (4, 4), 0.75, skip=("0", "6"))
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.75, steps=1, skip=("0", "6")).freeze()
    sp.bake(model)
    packed = sp.pack(model, f"{tmp_path}/a.packed.safetensors", block=(4, 4))
    assert expected.bytes is not None
    assert (expected.bytes.total, expected.bytes.kept) == (packed.dense, packed.size)


def test_budgets_in_macs_and_cycles_are_met_and_have_no_even_share() -> None:
    model = network()
    for budget in (sp.macs(0.5, example=X), sp.cycles(0.3, example=X, npu=sp.NPU.small())):
        planned = sp.plan(model, (4, 4), budget=budget)
        assert planned.expected is not None
        assert planned.expected.even_macs is None
        used, limit = sum(planned.expected.kept.values()), planned.n
        assert 0 < used < limit
    macs = expected_of(model, (4, 4), budget=sp.macs(0.5, example=X)).macs
    assert macs is not None
    fixed, dense = POSITIONS * 6 * 3 * 9 + 7 * 3, POSITIONS * (10 * 6 * 9 + 7 * 10)
    assert macs.kept - fixed <= dense // 2
    assert expected_of(model, (4, 4), budget=sp.cycles(0.3, example=X, npu=sp.NPU.small())).npu == sp.NPU.small()


def test_without_an_example_only_sizes_are_known() -> None:
    expected = expected_of(network(), (4, 4), 0.5)
    assert (expected.macs, expected.even_macs, expected.cycles, expected.speedup, expected.macs_for(2)) == (None,) * 5
    assert expected.bytes is not None
    assert "CPU      unknown without an input" in str(sp.plan(network(), (4, 4), 0.5))


def test_no_expectation_where_weights_have_no_rank() -> None:
    with torch.device("meta"):
        model = network()
    assert sp.plan(model, (4, 4), 0.5).expected is None
    model = network()
    assert sp.plan(model, (4, 4)).expected is None  # no budget
    assert sp.plan(model, (4, 4), 0.95, floor=0.5).expected is None  # cannot be met
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = math.nan
    assert sp.plan(model, (4, 4), 0.5).expected is None
    model = network()
    pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
    assert pruner.plan.expected is None
    assert sp.plan(model, (4, 4), 0.5, skip=("0",)).expected is None


def test_macs_budget_for_a_speed_reaches_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)))
    x = torch.zeros(1, 64, 20, 20)
    expected = expected_of(model, (16, 8), 0.5, include="*", example=x)
    assert expected.speedup is not None
    assert expected.macs is not None
    assert expected.speedup.low < expected.speedup.typical < expected.speedup.high
    for speedup in (2.0, 3.0):
        share = expected.macs_for(speedup)
        assert share is not None
        reached = expected_of(model, (16, 8), budget=sp.macs(share, example=x), include="*").speedup
        assert reached is not None
        assert speedup * 0.98 <= reached.typical <= speedup * 1.1
    assert expected.macs_for(1000) is None
    with pytest.raises(SmartpruneError, match="must be above 1"):
        expected.macs_for(1)


def test_measured_time_is_that_of_the_expected_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times vary, so the models that are timed are compared instead."""
    seen: list[nn.Module] = []

    def record(dense: nn.Module, pruned: nn.Module, example: object) -> None:
        seen.extend((dense, pruned))

    monkeypatch.setattr("smartprune.pruning.expected.measure_speed", record)
    model = network()
    expected = expected_of(model, (4, 4), 0.7, example=X, measure=True)
    dense, pruned = seen
    assert dense is model
    sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.7, steps=1, example=X).freeze()
    sp.bake(model)
    assert torch.equal(pruned[2].weight, model[2].weight)  # type: ignore[index]
    assert torch.equal(pruned[4].weight, model[4].weight)  # type: ignore[index]
    assert expected.kept
    with pytest.raises(SmartpruneError, match="give example=one input"):
        sp.plan(network(), (4, 4), 0.5, measure=True)


def test_text_and_json_have_the_same_numbers() -> None:
    planned = sp.plan(network(), (4, 4), 0.8, example=X)
    text, data = str(planned), json.loads(json.dumps(planned.to_json()))["expected"]
    assert planned.expected is not None
    assert data["kept"] == planned.expected.kept
    macs = data["model_macs"]
    assert f"MACs     {100 * macs['kept'] / macs['total']:.2f}% left in the model" in text
    assert f"{data['bytes']['kept']:,} of {data['bytes']['total']:,} bytes" in text
    assert data["cpu_speedup"] is None  # a small network
    assert "CPU      unknown for so small a network" in text
    with pytest.raises(SmartpruneError, match="npu is a str"):
        sp.plan(network(), (4, 4), 0.8, npu="edge")  # type: ignore[arg-type]
