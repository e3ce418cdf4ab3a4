import itertools
import math

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import zoo
from smartprune.pruning.telemetry import Telemetry, theorem_3_7


def test_measures_against_loops() -> None:
    telemetry = Telemetry([0, 3, 6], keep=3)
    masks = [torch.tensor([0.9, 0.2, 0.999, 0.4, 0.6, 0.001]), torch.tensor([0.4, 0.2, 0.999, 0.6, 0.6, 0.001])]
    for mask in masks:
        telemetry.measure(mask)
    measured = telemetry.read()
    last = masks[1].tolist()
    assert measured["undecided"] == sum(0.01 < m < 0.99 for m in last) == 4
    assert measured["changed"] == sum((a > 0.5) != (b > 0.5) for a, b in zip(*[m.tolist() for m in masks], strict=True)) == 2
    assert measured["gap"] == pytest.approx(sum(min(m, 1 - m) for m in last) / 6)
    assert measured["kept"] == [1, 2]


def test_telemetry_of_a_whole_search() -> None:
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.75, steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = []
    for _ in range(20):
        nn.functional.cross_entropy(model(x), torch.tensor([1, 2, 3, 4])).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        rows.append(pruner.telemetry())
    taus = [row["tau"] for row in rows]
    assert all(a > b for a, b in itertools.pairwise(taus))
    assert rows[0]["undecided"] == pruner.plan.n
    assert rows[-2]["undecided"] < pruner.plan.n / 4
    assert sum(rows[-1]["kept"].values()) == pruner.plan.keep
    assert rows[-1]["phase"] == "frozen"
    assert rows[-1]["collapsed"] == [layer.name for layer in pruner.plan.layers if not pruner.mask[layer.start : layer.stop].any()]
    theta = rows[5]["theta"]
    assert math.isfinite(theta)
    assert set(rows[5]["theorem_3_7"]) == {"nearest", "bound", "holds"}


def test_theorem_3_7_condition() -> None:
    scores = torch.tensor([0.1, 0.5, 0.9])
    telemetry = theorem_3_7(scores, theta=0.4, tau=1e-3, step=10)
    slow = min(min((float(m) - 0.4) ** 2, abs(float(m) - 0.4) / 10) for m in scores)
    assert telemetry["bound"] == pytest.approx(slow)
    assert telemetry["holds"] is True
    assert theorem_3_7(scores, theta=0.4, tau=0.5, step=10)["holds"] is False


def test_no_layer_counts_as_collapsed_while_the_mask_is_soft() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.9, include="*", steps=40)
    optimizer, telemetry = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(40):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        telemetry.append(pruner.telemetry())
    assert telemetry[0]["gap"] > 0.3
    assert telemetry[0]["collapsed"] == []
    assert telemetry[-1]["collapsed"] == [
        layer.name for layer in pruner.plan.layers if not pruner.mask[layer.start : layer.stop].any()
    ]
