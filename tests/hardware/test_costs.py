"""Budgets in costs of a table: integers, limits, files, receipts, and tables that do not fit."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import sweeps, training_jobs, zoo
from smartprune.cli import main
from smartprune.core.budget import Budget
from smartprune.experiments.compare.identity import protocol
from smartprune.experiments.sweep.grid import expand_grids

BLOCK = (4, 4)


def pruned(budget: Any, method: str = "magnitude", **options: Any) -> tuple[nn.Module, sp.Receipt, sp.Plan]:
    torch.manual_seed(0)
    model, _ = zoo.plain_cnn()
    pruner = sp.attach(model, method, block=BLOCK, budget=budget, steps=1, **options)
    pruner.freeze()
    plan = pruner.plan
    return model, sp.bake(model), plan


def requested(receipt: sp.Receipt) -> Any:
    assert receipt.requested is not None
    return receipt.requested


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["per block", "grid", "flat", "tensor", "layer"])
def test_the_budget_is_kept_and_missed_by_less_than_one_block(kind: str, share: float) -> None:
    torch.manual_seed(1)
    plan = sp.plan(zoo.plain_cnn()[0], BLOCK)
    table: dict[str, Any] = {}
    expected: dict[str, np.ndarray] = {}
    for layer in plan.layers:
        values = np.random.default_rng(layer.n).integers(0, 90, layer.grid.shape) / 10
        if kind in ("per block", "layer"):
            values = np.full(layer.grid.shape, 0.7 + len(layer.name))
        table[layer.weight] = {
            "per block": float(values.flat[0]),
            "grid": values,
            "flat": values.reshape(-1).tolist(),
            "tensor": torch.from_numpy(values),
            "layer": float(values.flat[0]) * layer.params,
        }[kind]
        sizes = layer.grid.sizes().reshape(layer.grid.shape).numpy()
        expected[layer.name] = values * sizes if kind == "layer" else values
    budget = sp.costs(share, table, per="layer" if kind == "layer" else "block")
    assert isinstance(budget, Budget)
    _, receipt, _ = pruned(budget)
    used = sum(float(expected[row.name].reshape(-1)[row.mask().numpy()].sum()) for row in receipt.layers)
    total = sum(float(values.sum()) for values in expected.values())
    unit = float(Fraction(requested(receipt).table["resolution"]))
    assert requested(receipt).total * unit == pytest.approx(total)
    assert requested(receipt).used * unit == pytest.approx(used)
    assert used <= (1 - share) * total * (1 + 1e-9)
    assert used > (1 - share) * total - max(values.max() for values in expected.values())
    assert receipt.met


def test_integers_are_exact_or_in_the_stated_resolution() -> None:
    layers = sp.plan(zoo.plain_cnn()[0], BLOCK).layers
    first, second = (layer.name for layer in layers)

    def integers(one: float, other: float, **options: Any) -> tuple[int, int, Fraction]:
        cost, unit = sp.costs(0.5, {first: one, second: other}, **options).table.integers(layers)
        assert cost.dtype == torch.int64
        return int(cost[0]), int(cost[-1]), unit

    assert integers(3, 7) == (3, 7, 1)
    assert integers(0.1, 2.25) == (10, 225, Fraction(1, 100))
    assert integers(np.float32(0.5), np.int16(2)) == (5, 20, Fraction(1, 10))  # type: ignore[arg-type]
    assert integers(0.1, 2.25, resolution=0.5) == (0, 4, Fraction(1, 2))  # 2.25 / 0.5 rounds to even
    one, other, unit = integers(1 / 3, 1e-6)
    assert abs(one * unit - Fraction(1, 3)) <= unit / 2
    assert abs(other * unit - Fraction(1, 10**6)) <= unit / 2
    assert 0 < unit <= Fraction(1, 10**11)
    one, _, unit = integers(1e30, 1e29)
    assert (unit > 1, one * unit == pytest.approx(1e30)) == (True, True)


def test_the_receipt_names_the_table(tmp_path: Path) -> None:
    table = {"3": 1.5, "6.weight": 4}
    model, receipt, plan = pruned(sp.costs(0.5, table, name="energy", unit="pJ"))
    ints = {"3.weight": 15, "6.weight": 40}
    expected = hashlib.sha256()
    for layer in plan.layers:
        expected.update(f'{"x".join(map(str, layer.grid.shape))} "{layer.weight}"\n'.encode())
        expected.update(np.full(layer.n, ints[layer.weight], "<i8").tobytes())
    assert requested(receipt).table == {"name": "energy", "unit": "pJ", "resolution": "1/10", "sha256": expected.hexdigest()}
    assert (requested(receipt).kind, requested(receipt).label, requested(receipt).unit) == ("costs", "energy", "units of 0.1 pJ")
    for shown in (str(receipt), str(plan)):
        assert "remove 50% of the energy: keep at most" in shown
        assert "units of 0.1 pJ" in shown
    assert expected.hexdigest() in str(receipt)
    receipt.save(tmp_path / "receipt.json")
    assert sp.Receipt.load(tmp_path / "receipt.json") == receipt
    assert sp.verify(model, receipt=tmp_path / "receipt.json").ok
    other = pruned(sp.costs(0.5, {**table, "3": 1.6}, name="energy", unit="pJ"))[1]
    assert requested(other).table["sha256"] != expected.hexdigest()
    data = receipt.to_json()
    for key, value in (("sha256", "0" * 63), ("resolution", "0"), ("name", 7), ("unit", "\n")):
        changed = json.loads(json.dumps(data))
        changed["asked"]["table"][key] = value
        with pytest.raises(sp.SmartpruneError, match=f"table: {key} is"):
            sp.Receipt.from_json(changed)


def test_a_search_keeps_the_budget_and_resumes() -> None:
    budget = sp.costs(0.6, {"3": 2, "6": 5}, name="energy", unit="pJ")
    model, x = zoo.plain_cnn()
    pruner = sp.attach(model, sp.Smart(), block=BLOCK, budget=budget, steps=4)
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.02)
    for step in range(4):
        nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
        if step == 1:
            other = sp.attach(zoo.plain_cnn()[0], sp.Smart(), block=BLOCK, budget=budget, steps=4)
            other.load_state_dict(pruner.state_dict())
            assert other.mask.equal(pruner.mask)
    assert sp.bake(model).met


def test_files_give_the_same_costs_as_dictionaries(tmp_path: Path) -> None:
    layers = sp.plan(zoo.plain_cnn()[0], BLOCK).layers
    flat = [0.5 + index for index in range(layers[1].n)]
    expected = sp.costs(0.5, {"3": 2.5, "6": flat}).table.integers(layers)[0]
    (tmp_path / "t.json").write_text(json.dumps({"name": "energy", "unit": "pJ", "costs": {"3": 2.5, "6": flat}}))
    lines = [*(f"3, {index},2.5" for index in range(layers[0].n)), "", *(f"6,{index},{cost}" for index, cost in enumerate(flat))]
    (tmp_path / "t.csv").write_text("\n".join(["layer,block,cost", *lines]) + "\n")
    for name in ("t.json", "t.csv"):
        budget = sp.costs(0.5, tmp_path / name)
        assert budget.table.integers(layers)[0].equal(expected)
    assert (sp.costs(0.5, tmp_path / "t.json").label, sp.costs(0.5, tmp_path / "t.json", name="heat").label) == ("energy", "heat")
    (tmp_path / "l.csv").write_text("\ufefflayer,cost\r\n3,2.5\r\n6,1e-3\r\n")
    cost, unit = sp.costs(0.5, str(tmp_path / "l.csv")).table.integers(layers)
    assert (int(cost[0]), int(cost[-1]), unit) == (2500, 1, Fraction(1, 1000))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", "", "unknown type of table '.txt'"),
        ("t.json", "[1]", "must be a JSON object with the costs by layer under 'costs'"),
        ("t.json", '{"costs": {"3": 1}, "cost": 2}', "must be a JSON object"),
        ("t.json", '{"costs": [1]}', "the table must be a dictionary"),
        ("t.json", '{"costs": {"3": 1}, "unit": 7}', "unit=7 must be a text"),
        ("t.json", '{"costs": {"3": 1}, "per": "model"}', "per='model'; it is 'block'"),
        ("t.json", '{"costs": {"3": NaN}}', "not readable as JSON"),
        ("t.csv", "", "the columns are ''; they must be layer,cost or layer,block,cost"),
        ("t.csv", "name,cost\n", "the columns are 'name,cost'"),
        ("t.csv", "layer,cost\n3\n", "line 2 is '3'; it must be layer,cost"),
        ("t.csv", "layer,cost\n3,1,2\n", "line 2 is '3,1,2'"),
        ("t.csv", "layer,cost\n3,cheap\n", "line 2 is '3,cheap'"),
        ("t.csv", "layer,cost\n3,1\n3,2\n", "every layer must have one line"),
        ("t.csv", "layer,block,cost\n3,1,2\n", "the next block of 3 is 0"),
        ("t.csv", 'layer,cost\n"3,1\n', "not readable as CSV"),
    ],
)
def test_wrong_files_are_explained(name: str, content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(sp.SmartpruneError) as caught:
        sp.costs(0.5, tmp_path / name)
    assert words in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        ({"3": 1}, {}, "the table 'costs' has no entry for 1 of 2 layers to prune: 6; add them, or leave"),
        ({"3": -1, "6": 1}, {}, "costs: 3 costs '-1'; a cost must be a number from 0"),
        ({"3": float("inf"), "6": 1}, {}, "costs: 3 costs 'inf'"),
        ({"3": float("nan"), "6": 1}, {}, "costs: 3 costs 'nan'"),
        ({"3": 10**400, "6": 1}, {}, "costs: 3 costs '1000"),
        ({"3": True, "6": 1}, {}, "costs: 3 costs 'True'"),
        ({"3": "cheap", "6": 1}, {}, "costs: 3 costs 'cheap'"),
        ({"3": [1, 2], "6": 1}, {}, "costs: 3 is an array of 2 int64; give numbers in the shape of the grid, 5x4x3x3, or one for"),
        ({"3": [[1], [2, 3]], "6": 1}, {}, "costs: 3 is an array"),
        ({"3": 0, "6": 0}, {}, "every block costs 0 units in the table 'costs'"),
        ({"3": 1, "6": 1}, {"resolution": 10}, "every block costs 0 units"),
        ({"3": 1, "6": 1}, {"resolution": 1e-20}, "more than 2**53 units of 1e-20; give a larger resolution="),
    ],
)
def test_tables_that_do_not_fit_are_explained(table: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.SmartpruneError) as caught:
        sp.plan(zoo.plain_cnn()[0], BLOCK, budget=sp.costs(0.5, table, **options))
    assert words in str(caught.value)


def test_wrong_arguments_are_explained() -> None:
    for options, words in (
        ({"table": {}}, "the table must be a dictionary"),
        ({"table": 7}, "7 is not a path"),
        ({"table": {"3": 1}, "name": ""}, "name='' must be a text"),
        ({"table": {"3": 1}, "resolution": 0}, "resolution=0 must be a number above 0"),
        ({"table": {"3": 1}, "resolution": True}, "resolution=True must be a number above 0"),
        ({"table": {"3": 1}, "share": 1}, r"costs=1 is outside [0, 1)"),
    ):
        with pytest.raises(sp.SmartpruneError) as caught:
            sp.costs(**{"share": 0.5, **options})  # type: ignore[arg-type]
        assert words in str(caught.value)


def test_the_command_line_reads_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "energy.json"
    table.write_text(json.dumps({"name": "energy", "unit": "pJ", "costs": {"0": 1, "2": 2.5}}))
    module = tmp_path / "costed_net.py"
    module.write_text("from torch import nn\n\n\ndef build():\n    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))\n")
    command = ("plan", "costed_net:build", "--block", "4x4", "--skip", "1", "--budget", "costs=0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert main([*command, "--cost-table", str(table)]) == 0
        assert "remove 50% of the energy: keep at most 70 of 140 units of 0.1 pJ" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            main([*command])
        assert "there is no table; give one, or on the command line --cost-table FILE" in capsys.readouterr().err


def test_runs_and_sweeps_take_tables(tmp_path: Path) -> None:
    table = tmp_path / "energy.csv"
    table.write_text("layer,cost\nx,1\n")
    options = {"budget": "costs=0.5", "sparsity": None}
    config = training_jobs.small_config(tmp_path / "run", **options, cost_table=str(table))
    assert "cost table energy.csv" in protocol(vars(config))
    with pytest.raises(sp.SmartpruneError, match=r"budget=costs: there is no table of costs; give cost_table"):
        training_jobs.small_config(tmp_path / "run", **options)
    with pytest.raises(sp.SmartpruneError, match=r"is for budgets such as costs=SHARE, and the budget is sparsity"):
        training_jobs.small_config(tmp_path / "run", sparsity=0.5, cost_table=str(table))
    cell, _ = expand_grids(
        [sweeps.small_grid(sparsities=(None,), options={**sweeps.OPTIONS, "budget": "costs=0.5", "cost_table": str(table)})]
    )
    assert cell.config.cost_table == str(table)
