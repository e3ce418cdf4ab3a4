"""Tables of measured times: the measurement, curves, and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smartprune as sp
from helpers.latency_tables import X, net, table_of
from smartprune import SmartpruneError
from smartprune.runtime import latency_measure
from smartprune.runtime.latency_table import Curve, LatencyTable


@pytest.fixture
def table() -> LatencyTable:
    return table_of(sp.plan(net(), (4, 4), sparsity=0.5).layers)


def test_a_measurement_has_every_layer_and_the_whole_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_measure, "SECONDS", 0.0)
    monkeypatch.setattr(latency_measure, "LEAST_ROUNDS", 2)
    model = net().train()
    before = [p.clone() for p in model.parameters()]
    plan = sp.plan(model, (4, 4), sparsity=0.5)
    table = latency_measure.measure_latency(model, plan.layers, X, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training
    assert set(table.layers) == {layer.weight for layer in plan.layers}
    for layer in plan.layers:
        curve = table.layers[layer.weight]
        assert (curve.x[0], curve.x[-1]) == (0, layer.params)
        assert list(curve.ps) == sorted(curve.ps)
    assert max(curve.ps[-1] for curve in table.layers.values()) > 0
    assert table.network.x[-1] == sum(curve.ps[-1] for curve in table.layers.values())
    assert (table.threads, table.input) == (1, "1x3x12x12")


def test_a_curve_interpolates_like_numpy() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        x = np.unique(draw.integers(0, 1000, 8))
        ps = np.sort(draw.integers(0, 10**6, len(x)))
        curve = Curve(tuple(x.tolist()), tuple(ps.tolist()))
        for at in draw.integers(-10, 1100, 30).tolist():
            assert curve.at(at) == pytest.approx(np.interp(at, x, ps), abs=1)
    assert Curve.through([(5, 9), (0, 4), (5, 8), (7, 3)]) == Curve((0, 5, 7), (4, 8, 8))


def test_damaged_files_give_errors(table: LatencyTable, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    good = table.to_json()
    layers: Any = good["layers"]
    network: Any = good["network"]
    for change, words in (
        ({"format": 2}, "format is 2"),
        ({"threads": 0}, "threads is 0"),
        ({"layers": [{**layers[0], "x": [3, 2]}, *layers[1:]]}, "not a curve"),
        ({"layers": layers[1:]}, "network goes from"),
        ({"layers": [*layers, layers[0]]}, "the name of one layer only"),
        ({"network": {"x": [0], "ps": [-1]}}, "none below 0"),
        ({"network": {"x": network["x"], "ps": [0] * len(network["ps"])}}, "network takes 0 ps"),
        ({"extra": 1}, "extra"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(SmartpruneError, match=words):
            sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=X, table=path))
    replace(table, machine="another machine").save(path)
    assert LatencyTable.load(path).digest != table.digest
