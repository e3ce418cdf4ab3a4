"""Cells whose result is in a record are not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.sweeps import OPTIONS, finish, small_grid, sweep_arguments, write_record
from smartprune.cli import main
from smartprune.experiments.sweep.grid import Cell, expand_grids, read_grids
from smartprune.experiments.sweep.records import recorded_cells


def test_recorded_cells_are_recognized_by_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder, the label, the machine and its speed do not matter."""
    options = {**OPTIONS, "amp": "auto"}
    (cell,) = expand_grids([small_grid(methods=("smart",), options=options)])
    finish(tmp_path / "runs", cell, amp="bf16", device="cuda", threads=7, dense="/elsewhere/d.safetensors")
    records = [write_record(tmp_path / "records" / "one", tmp_path / "runs")]

    def known(cells: list[Cell]) -> bool:
        (name,) = [other.name for other in cells]
        return recorded_cells(records, cells) == {name}

    def one(seed: int = 0, sparsity: float | None = 0.5, **changes: Any) -> list[Cell]:
        values: dict[str, Any] = {"methods": ("smart",), "options": options, **changes}
        return expand_grids([small_grid(seeds=(seed,), sparsities=(sparsity,), **values)])

    same: list[dict[str, Any]] = [{"amp": "bf16"}, {"device": "cpu"}, {"checkpoint_seconds": 1}, {"graph": "off"}]
    for change in same:
        assert known(one(label="other", options={**options, **change})), change
    other: list[dict[str, Any]] = [{"amp": "off"}, {"lr": 0.2}, {"search_epochs": 3}, {"dense_epochs": 3}, {"block": "8x4"}]
    other += [{"floor": 0.01}, {"skip": ["head"]}, {"ema": 0.9}, {"task_settings": {"width": 5}}]
    for change in other:
        assert not known(one(options={**options, **change})), change
    assert not known(one(seed=1))
    assert not known(one(sparsity=0.6))
    assert not known(one(sparsity=None, options={**options, "macs": 0.5}))
    assert not known(one(methods=("gradual",)))
    assert not known(one(settings={"smart": {"ramp": "cubic"}}))
    assert known(one(settings={"smart": {"ramp": "none"}}))
    path = records[0] / "result.json"
    values = json.loads(path.read_text())
    assert values["rows"][0]["method"] == "smart"
    values["rows"][0]["settings"]["ramp"] = "cubic"  # as if it had been the default when the record was written
    path.write_text(json.dumps(values))
    assert not known(one())
    assert known(one(settings={"smart": {"ramp": "cubic"}}))


def test_list_shows_the_state_of_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    cells = expand_grids([small_grid(methods=("smart", "magnitude", "gradual"), seeds=(0, 1), dense_seed=0)])
    names = [cell.name for cell in cells]
    finish(out, cells[0])
    for cell in cells[:2]:
        finish(runs, cell)
    write_record(tmp_path / "records" / "one", runs)
    for cell in cells[2:5]:
        finish(runs, cell)
    extra = tmp_path / "records" / "two"
    extra.mkdir()
    row: dict[str, Any] = {
        "model": "m",
        "data": "d",
        "method": "topk",
        "block": "-",
        "sparsity": "-",
        "protocol": "-",
        "metric": "ms",
    }
    row |= {"values": [1.0], "mean": 1.0, "std": None, "n": 1}
    (extra / "result.json").write_text(json.dumps({"rows": [row]}))  # rows of a benchmark have no seeds
    words = ["--methods", "smart,magnitude,gradual", "--seeds", "0,1", "--dense-seed", "0"]
    words = [*sweep_arguments(out, *words), "--recorded", str(tmp_path / "records")]
    before = sorted(out.rglob("*"))
    assert main([*words, "--list"]) == 0
    states = ["done", "recorded", *["missing"] * 4]
    lines = [f"{state:<8}  {name}" for state, name in zip(states, names, strict=True)]
    lines += ["", "dense models of the missing cells", f"missing   {cells[0].dense}  for 4 cells", ""]
    assert capsys.readouterr().out.splitlines() == [*lines, "6 cells: 1 done, 1 recorded, 4 missing"]
    assert sorted(out.rglob("*")) == before
    (out / "dense").mkdir()
    (out / "dense" / f"{cells[0].dense}.safetensors").touch()
    assert main([*words, "--recorded", str(write_record(tmp_path / "more", runs)), "--list"]) == 0
    values = capsys.readouterr().out
    assert f"done      {cells[0].dense}  for 1 cell\n" in values
    assert values.endswith("6 cells: 1 done, 4 recorded, 1 missing\n")
    finish(runs, cells[5])
    assert main([*words, "--recorded", str(write_record(tmp_path / "more", runs))]) == 0
    assert capsys.readouterr().err == "6 of 6 cells are recorded already\n"
    assert not (out / "logs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [0]}, "rows[0]: seeds is a list of 1; it must be a list of 2 integers, one per value"),
        ({"seeds": ["0", "1"]}, "rows[0]: seeds is a list of 2; it must be a list of at most"),
        ({"settings": None}, "rows[0]: settings is None; it must be a dictionary"),
        ({"protocol": 3}, "rows[0]: protocol is 3; it must be a string"),
        ({"sparsity": "0.5"}, "rows[0]: sparsity is '0.5'; it must be a number"),
        ({"sparsity": None, "macs": None}, "rows[0]: sparsity is None; it must be a number"),
        ({"mean": 0.3}, "rows[0]: mean is 0.3"),
        (None, "not readable as JSON"),
    ],
)
def test_a_damaged_record_is_an_error(
    change: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in expand_grids([small_grid(methods=("smart",), seeds=(0, 1))]):
        finish(tmp_path / "runs", cell)
    path = write_record(tmp_path / "one", tmp_path / "runs") / "result.json"
    values = json.loads(path.read_text())
    values["rows"][0] |= change or {}
    path.write_text(json.dumps(values)[: None if change else -9])
    with pytest.raises(SystemExit) as stop:
        main(sweep_arguments(tmp_path / "out", "--recorded", str(path.parent)))
    assert stop.value.code == 2
    captured = capsys.readouterr().err
    assert f"{path}: " in captured
    assert message in captured


RECORDS = Path(__file__).parents[3] / "records"


def test_published_records_cover_cells_of_the_paper_grid() -> None:
    paper = expand_grids(read_grids(RECORDS / "paper.json"))
    name = "cifar10-resnet18-short-gradual-16x8-0.97-s{}"
    known = recorded_cells([RECORDS], paper)
    assert {name.format(0), name.format(1)} <= known
    assert known < {cell.name for cell in paper}
    first = replace(read_grids(RECORDS / "paper.json")[0], methods=("gradual",), sparsities=(0.97,), seeds=(0, 1))
    elsewhere = expand_grids([first.override({"task_settings": {"folder": "/data"}}, {})])
    assert len(recorded_cells([RECORDS / "cifar10-resnet18-short"], elsewhere)) == 2
