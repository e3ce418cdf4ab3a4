"""The budget that docs/extend.md adds works everywhere without another file being edited."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import sweeps, training_jobs, zoo
from smartprune.budgets import BUDGETS
from smartprune.cli import main
from smartprune.core.budget import Budget, ResolvedBudget
from smartprune.experiments.compare.comparison import compare
from smartprune.experiments.compare.identity import row_keys
from smartprune.experiments.sweep.grid import expand_grids
from smartprune.reports.page import write_page
from smartprune.training.train import train

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def snippet() -> str:
    section = PAGE.read_text().split("## A budget", 1)[1].split("\n## ", 1)[0]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    return code[1]


@pytest.fixture
def energy() -> Iterator[Any]:
    before = set(BUDGETS)
    exec(compile(snippet(), str(PAGE), "exec", dont_inherit=True), {"__name__": "energy"})
    (kind,) = set(BUDGETS) - before
    yield BUDGETS[kind]
    del BUDGETS[kind]


def test_a_budget_takes_fewer_than_30_lines() -> None:
    assert len([line for line in snippet().splitlines() if line.strip()]) < 30


def test_plan_attach_bake_receipt_and_verify(energy: Any, tmp_path: Path) -> None:
    model, x = zoo.plain_cnn()
    budget = energy(0.75)
    assert isinstance(budget, Budget)
    plan = sp.plan(model, (4, 4), budget=budget)
    total = 16 * 20 * 9 + 3 * 20 * 12
    assert (plan.unit, plan.total, plan.limit, plan.keep) == ("pJ", total, total // 4, None)
    assert f"budget   remove 75% of the energy: keep at most {total // 4:,} of {total:,} pJ" in str(plan)
    assert plan.to_json()["budget"] == {"kind": "energy", "share": "3/4"}
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), budget=budget, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(3):
        nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    receipt = sp.bake(model)
    requested = receipt.requested
    assert requested is not None
    assert (requested.kind, requested.total, requested.limit) == ("energy", total, total // 4)
    assert total // 4 - 3 * 16 < requested.used <= requested.limit
    assert receipt.met
    assert f"kept     {requested.used:,} pJ" in str(receipt)
    receipt.save(tmp_path / "receipt.json")
    assert sp.Receipt.load(tmp_path / "receipt.json") == receipt
    assert sp.verify(model, receipt=tmp_path / "receipt.json").ok


def test_a_receipt_of_an_unknown_budget_loads_and_prints(energy: Any) -> None:
    model, _ = zoo.plain_cnn()
    sp.attach(model, sp.Magnitude(), block=(4, 4), budget=energy(0.5), steps=1).freeze()
    receipt = sp.bake(model)
    data = json.loads(json.dumps(receipt.to_json()).replace('"energy"', '"heat"'))
    text = str(sp.Receipt.from_json(data))
    assert "budget   remove 50% of the heat: keep at most 1,800 of 3,600" in text


def test_train_compare_and_report(energy: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for seed in (0, 1):
        run = tmp_path / f"run{seed}"
        result = train(
            training_jobs.small_config(
                run, dense_epochs=1, search_epochs=1, finetune_epochs=1, sparsity=None, budget="energy=0.75", seed=seed
            )
        )
        assert result.verified
        receipt = sp.Receipt.load(run / "receipt.json")
        assert receipt.requested is not None
        assert (receipt.requested.kind, receipt.met) == ("energy", True)
    comparison = compare([tmp_path])
    assert not comparison.left_out
    (row,) = comparison.rows
    assert "energy 0.75" in str(comparison)
    assert "energy" in comparison.csv().splitlines()[0].split(",")
    data = row.to_json()
    assert (data["sparsity"], data["macs"], data["energy"]) == (None, None, 0.75)
    assert [key[-2:] for key in row_keys(data, "row")] == [(("energy", 0.75), 0), (("energy", 0.75), 1)]
    page, chart = tmp_path / "compare.html", tmp_path / "compare.svg"
    assert main(["compare", str(tmp_path), "--html", str(page), "--plot", str(chart)]) == 0
    assert "75 % of energy" in page.read_text()
    assert "MACs of the pruned layers left, %" in chart.read_text()
    write_page(tmp_path / "report.html", tmp_path / "run0")
    assert re.search(
        r"75 % of the energy of the pruned layers, keep at most [\d,]+ of [\d,]+", (tmp_path / "report.html").read_text()
    )


def test_sweep(energy: Any) -> None:
    options = {**sweeps.OPTIONS, "budget": "energy=0.75"}
    cell, _ = expand_grids([sweeps.small_grid(sparsities=(None,), options=options)])
    assert cell.name == "digits-resnet8-smart-4x2-energy0.75-s0"
    assert cell.config.budget_share == ("energy", 0.75)
    with pytest.raises(sp.SmartpruneError, match="sparsities and budget: a run has one budget"):
        expand_grids([sweeps.small_grid(options=options)])


def test_command_line(energy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "resnet18", "--budget", "energy=0.5"]) == 0
    assert "remove 50% of the energy" in capsys.readouterr().out
    for value, words in (
        ("heat=0.5", "unknown budget 'heat'; choose one of: blocks, params, macs, cycles, costs, latency, energy"),
        ("energy", "budget='energy' cannot be read; write KIND=SHARE"),
        ("energy=50", "energy=50.0 is outside [0, 1)"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["plan", "resnet18", "--budget", value])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (7, r"resolve\(\) of the budget 'energy' returned a int; return a ResolvedBudget"),
        (ResolvedBudget(None, 2.5), r"returned limit=2.5; it must be an integer"),  # type: ignore[arg-type]
        (ResolvedBudget(torch.ones(195), 5), r"returned a cost of 195 torch.float32; it must be int64"),
        (ResolvedBudget(torch.ones(3, dtype=torch.long), 5), r"one entry, not negative, for each of the 195 blocks"),
        (ResolvedBudget(-torch.ones(195, dtype=torch.long), 5), r"not negative"),
    ],
)
def test_a_wrong_result_of_resolve_is_named(energy: Any, monkeypatch: pytest.MonkeyPatch, result: object, words: str) -> None:
    monkeypatch.setattr(energy, "resolve", lambda self, model, layers: result)
    with pytest.raises(sp.SmartpruneError, match=words):
        sp.plan(zoo.plain_cnn()[0], (4, 4), budget=energy(0.5))


def test_a_wrong_budget_is_named(energy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.plain_cnn()
    with pytest.raises(sp.SmartpruneError, match=r"energy=75 is outside \[0, 1\)"):
        sp.plan(model, (4, 4), budget=energy(75))
    with pytest.raises(sp.SmartpruneError, match="is a type; write sparsity="):
        sp.plan(model, (4, 4), budget=energy)
    monkeypatch.setattr(energy, "kind", "my energy")
    with pytest.raises(sp.SmartpruneError, match="kind 'my energy'; it must be a word"):
        sp.plan(model, (4, 4), budget=energy(0.5))
