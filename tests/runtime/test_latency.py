"""latency: a budget in measured time. Only one test measures; the others use tables with given numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import training_jobs
from helpers.latency_tables import X, net, table_of
from smartprune import SmartpruneError
from smartprune.cli import main
from smartprune.core.budget import InfeasibleBudgetError
from smartprune.runtime import latency, latency_measure
from smartprune.runtime.latency import LatencyBudget
from smartprune.runtime.latency_table import LatencyTable
from smartprune.training.train import train


@pytest.fixture
def table() -> LatencyTable:
    return table_of(sp.plan(net(), (4, 4), sparsity=0.5).layers)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_measure, "SECONDS", 0.0)
    monkeypatch.setattr(latency_measure, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(latency_measure, "SHARES", (0.0, 0.2, 1.0))


def test_a_file_is_written_once_and_then_decides(quick: None, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    first = sp.plan(net(), (4, 4), budget=sp.latency(0, example=X, table=path))
    written = path.read_bytes()
    again = sp.plan(net(), (4, 4), budget=sp.latency(0, example=None, table=path))
    assert path.read_bytes() == written
    assert first.bound == again.bound
    assert first.cost is not None
    assert again.cost is not None
    assert torch.equal(first.cost, again.cost)
    assert LatencyTable.load(path).to_json() == json.loads(written)


@pytest.mark.parametrize("floor", [None, 0.1])
def test_the_mask_fits_the_promise_and_one_more_block_does_not(table: LatencyTable, floor: float | None) -> None:
    """The time of a mask is added up in numpy."""
    for share in (0.0, 0.2, 0.4):
        plan = sp.plan(net(), (4, 4), budget=sp.latency(share, example=X, table=table), floor=floor)
        assert plan.feasible
        assert plan.exact is not None
        limit, total = plan.bound
        assert limit is not None
        assert (total, limit) == (table.dense_ps, int((1 - Fraction(str(share))) * table.dense_ps))

        def time_of(mask: torch.Tensor, plan: sp.Plan = plan) -> float:
            elements = [
                float(layer.grid.expand(mask[layer.start : layer.stop].float()).expand(layer.grid.weight_shape).sum())
                for layer in plan.layers
            ]
            curves = [table.layers[layer.weight] for layer in plan.layers]
            return float(np.interp(sum(np.interp(e, c.x, c.ps) for e, c in zip(elements, curves, strict=True)), *table_xy(table)))

        rank = torch.rand(plan.n, generator=torch.Generator().manual_seed(1))
        layer = torch.cat([torch.full((entry.n,), i) for i, entry in enumerate(plan.layers)])
        mask = plan.exact.best(rank, plan.min_keep, None if floor is None else layer)
        assert mask is not None
        assert plan.exact.of(mask) == pytest.approx(time_of(mask), abs=len(plan.layers) + 2)
        assert plan.exact.of(mask) <= limit
        if not mask.all():
            more = mask.clone()
            more[rank.masked_fill(mask, -1).argmax()] = True
            assert plan.exact.of(more) > limit


def table_xy(table: LatencyTable) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return table.network.x, table.network.ps


def test_attach_bake_receipt_and_verify(table: LatencyTable, tmp_path: Path) -> None:
    model = net()
    pruner = sp.attach(model, sp.Magnitude(), block=(4, 4), budget=sp.latency(0.5, example=X, table=table), steps=1)
    pruner.freeze()
    receipt = sp.bake(model)
    requested = receipt.requested
    assert requested is not None
    assert (requested.kind, requested.of, requested.total) == ("latency", "model", table.dense_ps)
    assert requested.used <= requested.limit == table.dense_ps // 2
    assert requested.table is not None
    assert requested.table["machine"] == "a machine"
    assert requested.table["promised_ms"] == pytest.approx(table.dense_ps / 2e9, abs=1e-9)
    assert requested.table["sha256"] == table.digest
    receipt.save(tmp_path / "receipt.json")
    assert sp.Receipt.load(tmp_path / "receipt.json") == receipt
    assert sp.verify(model, receipt=tmp_path / "receipt.json").ok
    assert "remove 50% of the model's CPU time" in str(receipt)


def test_a_search_is_resumed_with_the_stored_table(table: LatencyTable, tmp_path: Path) -> None:
    """The second pruner has the same costs, so it accepts the state and ends with the same mask."""
    table.save(tmp_path / "latency.json")

    def attach() -> tuple[nn.Module, sp.Pruner]:
        model = net()
        budget = sp.latency(0.5, example=X, table=tmp_path / "latency.json")
        return model, sp.attach(model, sp.Smart(), block=(4, 4), budget=budget, steps=4)

    def steps(model: nn.Module, pruner: sp.Pruner, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 12, 12)).square().sum().backward()
            optimizer.step()
            pruner.step()

    model, pruner = attach()
    steps(model, pruner, 2)
    stored, weights = pruner.state_dict(), model.state_dict()
    other, resumed = attach()
    other.load_state_dict(weights)
    resumed.load_state_dict(stored)
    for one, two in ((model, pruner), (other, resumed)):
        steps(one, two, 2)
    assert torch.equal(pruner.mask, resumed.mask)
    assert sp.bake(model).mask_hash == sp.bake(other).mask_hash


def test_resuming_with_another_measurement_names_the_table(table: LatencyTable) -> None:
    other = table_of(sp.plan(net(), (4, 4), sparsity=0.5).layers, seed=1)
    first, second = (
        sp.attach(net(), sp.Smart(), block=(4, 4), budget=sp.latency(0.5, example=X, table=times), steps=4)
        for times in (table, other)
    )
    with pytest.raises(
        SmartpruneError, match=r"attach with the arguments of the saved run, and give the budget the table= of that run"
    ):
        second.load_state_dict(first.state_dict())


def test_errors_say_what_is_possible(table: LatencyTable, tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match=r"latency=1.5 is outside \[0, 1\)"):
        sp.latency(1.5, example=X)
    with pytest.raises(SmartpruneError, match="threads=0 is not a number from 1 to 256"):
        sp.latency(0.5, example=X, threads=0)
    least = 1 - Fraction(table.network.ps[0], table.dense_ps)
    with pytest.raises(InfeasibleBudgetError, match=rf"at most {int(10_000 * least) / 10_000:g} of the time can be removed"):
        sp.plan(net(), (4, 4), budget=sp.latency(0.9999, example=X, table=table))
    with pytest.raises(SmartpruneError, match=r"0 of them have the shape and the blocks of the \d+ layers to prune; measure again"):
        sp.plan(net(), (8, 8), budget=sp.latency(0.5, example=X, table=table))
    with pytest.raises(SmartpruneError, match="example is missing"):
        sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=None))
    with pytest.raises(SmartpruneError, match="no layer to prune gets faster"):  # torch runs it
        sp.plan(nn.Sequential(nn.Conv3d(2, 8, 3)), (4, 4), budget=sp.latency(0.5, example=torch.zeros(1, 2, 4, 4, 4)), include="0")


def test_a_table_of_other_threads_or_of_another_input_is_refused(table: LatencyTable, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    table.save(path)
    with pytest.raises(
        SmartpruneError, match=r"was measured with threads=1, and threads=2 is given; give threads=1, or another file"
    ):
        sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=X, threads=2, table=path))
    with pytest.raises(SmartpruneError, match=r"with an input of 1x3x12x12, and the example is 2x3x12x12; give such an example"):
        sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=torch.zeros(2, 3, 12, 12), table=path))
    replace(table, threads=2).save(path)
    assert sp.plan(net(), (4, 4), budget=LatencyBudget(Fraction(1, 2), X, table=path)).feasible  # the command line gives no threads
    for damage, words in ((b"", "not readable as JSON"), (b"{}", "format")):
        path.write_bytes(damage)
        with pytest.raises(SmartpruneError, match=words):
            sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=X, table=path))
    with pytest.raises(SmartpruneError, match=r"the folder .* does not exist\); create it first"):
        sp.plan(net(), (4, 4), budget=sp.latency(0.5, example=X, table=tmp_path / "missing" / "latency.json"))


def test_plan_and_receipt_say_what_is_promised(table: LatencyTable) -> None:
    model = net()
    plan = sp.plan(model, (4, 4), budget=sp.latency(0.4, example=X, table=table))
    ms = f"{0.6 * table.dense_ps / 1e9:.3g} of {table.dense_ps / 1e9:.3g} ms"
    promise = "a call takes about 60% of the dense model's time, with both timed in turns"
    assert f"promise  {promise}\n         {ms} when they were measured (a machine, 1 thread)" in str(plan)
    receipt = sp.prune(model, [torch.randn(16, 3, 12, 12)], (4, 4), budget=sp.latency(0.4, example=X, table=table))
    assert receipt.requested is not None
    assert receipt.requested.table is not None
    assert receipt.requested.table["promise"] == promise


def test_an_interrupted_call_needs_a_stored_table(table: LatencyTable, tmp_path: Path) -> None:
    """Two measurements differ, so without a file the second call would be refused."""
    calibration = [torch.randn(16, 3, 12, 12)]
    with pytest.raises(SmartpruneError, match=r"would measure again; give the budget a file for its measurement"):
        sp.prune(net(), calibration, (4, 4), budget=sp.latency(0.4, example=X), folder=tmp_path / "steps")
    table.save(tmp_path / "latency.json")
    budget = sp.latency(0.4, example=X, table=tmp_path / "latency.json")
    assert sp.prune(net(), calibration, (4, 4), budget=budget, folder=tmp_path / "steps").met


def test_command_line_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run keeps its table, and plan accepts it."""
    monkeypatch.setattr(latency, "measure_latency", lambda model, layers, example, threads: table_of(layers, example=example))
    pytest.importorskip("sklearn")
    run = tmp_path / "run"
    config = training_jobs.small_config(
        run, dense_epochs=1, search_epochs=1, finetune_epochs=1, sparsity=None, budget="latency=0.4"
    )
    assert train(config).verified
    receipt = sp.Receipt.load(run / "receipt.json")
    assert receipt.requested is not None
    assert receipt.requested.table is not None
    assert receipt.requested.table["sha256"] == LatencyTable.load(run / "latency.json").digest
    assert receipt.met
    path = tmp_path / "resnet18.json"
    command = ["plan", "resnet18", "--budget", "latency=0.4", "--input", "3x32x32", "--cost-table", str(path)]
    assert main(command) == 0
    first = capsys.readouterr().out
    line = next(line for line in first.splitlines() if line.startswith("budget"))
    assert "remove 40% of the model's CPU time: keep at most" in line
    monkeypatch.setattr(latency, "measure_latency", None)  # not called again
    assert main(command) == 0
    assert line in capsys.readouterr().out


def test_read_table_gives_the_path(tmp_path: Path) -> None:
    assert LatencyBudget.read_table(str(tmp_path / "a.json")) == tmp_path / "a.json"
