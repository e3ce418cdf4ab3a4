"""Runs side by side: what is pooled, what is kept apart, what is left out and why."""

from __future__ import annotations

import csv
import importlib.util
import json
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.training_jobs import run_cli, small_config
from smartprune import SmartpruneError
from smartprune.experiments.compare import compare, protocol, read_entry
from smartprune.experiments.compare.chart import Chart, Point, Series, svg, ticks
from smartprune.experiments.compare.page import comparison_page
from smartprune.experiments.compare.record import check_rows, markdown
from smartprune.experiments.compare.table import comparison_text
from smartprune.methods import METHODS

VERSIONS = {"smartprune": "0", "torch": "2", "python": "3", "system": "s", "device": "cpu", "threads": "1"}


def made(root: Path, pruned: float, dense: float = 0.9, **changes: Any) -> Path:
    """A finished run that nobody trained."""
    name = "-".join(f"{value}" for value in changes.values()).replace("/", "_").replace(" ", "") or "plain"
    folder = root / name
    folder.mkdir(parents=True)
    config = small_config(folder, **changes)
    (folder / "config.json").write_text(json.dumps(asdict(config)))
    result: dict[str, Any] = {"folder": str(folder), "task": config.task, "model": config.model, "method": config.method}
    result |= {"measure": "accuracy", "dense": dense, "pruned": pruned, "verified": True, "seconds": 1.5}
    (folder / "result.json").write_text(json.dumps({**result, "stage_seconds": {}, "versions": VERSIONS}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three methods, two sparsities, two seeds."""
    out = tmp_path / "runs"
    for method, value in (("magnitude", 0.5), ("gradual", 0.7), ("smart", 0.6)):
        for sparsity in (0.9, 0.5):
            for seed in (0, 1):
                shift = 0.1 * (sparsity == 0.9)
                made(out, value - shift + 0.02 * seed, 0.9 + 0.02 * seed, method=method, sparsity=sparsity, seed=seed)
    return out


def test_the_table(runs: Path) -> None:
    lines = comparison_text(compare([runs]), ascii_only=False).splitlines()
    assert lines[0] == "digits(width=4), resnet8, blocks of 4x2: accuracy in %, test split, after the last epoch"
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert lines[start].split() == ["method", "dense", "0.5", "diff", "n", "0.9", "diff", "n"]
    body = [line.split() for line in lines[start + 1 :]]
    assert [line[0] for line in body] == [name for name in METHODS if name in ("smart", "magnitude", "gradual")]
    assert body[0] == ["smart", "91.00", "±", "1.41", "61.00", "±", "1.41", "-30.00", "2", "51.00", "±", "1.41", "-40.00", "2"]


def test_macs_that_are_left(runs: Path, tmp_path: Path) -> None:
    """Budgets in blocks leave more MACs to one method than to another."""
    for folder in runs.iterdir():
        method, sparsity, seed = folder.name.split("-")
        kept = {"magnitude": 300, "gradual": 200, "smart": 100}[method] + 10 * int(seed)
        if method != "magnitude" or sparsity == "0.5":  # one that was never counted
            achieved = {"achieved": {"macs": {"total": 1000, "kept": kept, "removed": 1000 - kept}}}
            (folder / "receipt.json").write_text(json.dumps(achieved))
    found = compare([runs])
    lines = comparison_text(found, ascii_only=False).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("MACs left, %"))
    assert lines[start].split() == ["MACs", "left,", "%", "0.5", "0.9"]
    told = "10.50 ± 0.71"
    assert [line.split() for line in lines[start + 1 :]] == [
        ["smart", *told.split(), *told.split()],
        ["magnitude", "30.50", "±", "0.71", "-"],
        ["gradual", "20.50", "±", "0.71", "20.50", "±", "0.71"],
    ]
    rows = found.to_json()["rows"]
    assert [row.get("macs_left") for row in rows] == [[0.1, 0.11], [0.1, 0.11], [0.3, 0.31], None, [0.2, 0.21], [0.2, 0.21]]
    table, common = markdown(rows, {"show": "macs_left", "method": "[sg]*"})
    assert table[2] == "| smart | 10.50 ± 0.71 | 10.50 ± 0.71 |"
    assert common.endswith("MACs left in %, mean ± standard deviation, n = 2.")
    with pytest.raises(SmartpruneError, match="in place of the metric is macs_left"):
        markdown(rows, {"show": "seconds"})
    with pytest.raises(SmartpruneError, match="no row has"):
        markdown(rows, {"show": "macs_left", "method": "none"})
    for wrong in (None, "0.1", float("nan")):
        with pytest.raises(SmartpruneError, match=r"smart: macs_left is .*; it must be a list of numbers"):
            markdown([rows[0] | {"macs_left": [0.1, wrong]}], {"show": "macs_left"})
    page = tmp_path / "page.html"
    assert run_cli("compare", str(runs), "--html", str(page), "--csv", str(tmp_path / "a.csv")) == 0
    assert "MACs left, %" in page.read_text()
    told_by = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert {line["macs_left"] for line in told_by} == {"0.1", "0.11", "0.2", "0.21", "0.3", "0.31", ""}


def test_macs_that_are_left_at_many_sparsities(tmp_path: Path) -> None:
    """A table has room for its heading, in plain ASCII, too, which takes a column more for every number."""
    for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        for seed in (0, 1):
            settings = {"start": 1.0, "ramp": "cubic", "mask_type": "stochastic"}
            folder = made(tmp_path, 0.5, sparsity=sparsity, seed=seed, settings=settings)
            achieved = {"achieved": {"macs": {"total": 1000, "kept": 100 + seed}}}
            (folder / "receipt.json").write_text(json.dumps(achieved))
    lines = comparison_text(compare([tmp_path]), ascii_only=True).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("MACs left, %")]
    assert len(starts) == 2
    assert max(len(line) for line in lines[starts[0] :]) <= 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"achieved": {"macs": null}}',
        '{"achieved": {"macs": {"total": 0, "kept": 0}}}',
        '{"achieved": {"macs": {"total": 10, "kept": 20}}}',
    ],
)
def test_a_receipt_without_macs(tmp_path: Path, text: str) -> None:
    folder = made(tmp_path, 0.5)
    (folder / "receipt.json").write_text(text)
    assert read_entry(folder).macs_left is None


def test_rows_are_records(runs: Path) -> None:
    data = compare([runs]).to_json()
    rows = check_rows(data, "here")
    assert len(rows) == 6
    assert rows[0]["method"] == "smart"
    assert rows[0]["seeds"] == [0, 1]
    assert rows[0]["values"] == pytest.approx([0.6, 0.62])
    assert rows[0]["dense"]["values"] == pytest.approx([0.9, 0.92])
    assert rows[0]["difference"] == pytest.approx(-0.3)
    assert data["versions"] == [VERSIONS]


def test_globs_parents_and_repeats_are_one(runs: Path) -> None:
    assert len(compare([runs, runs.parent, str(runs / "smart*"), runs / "smart-0.9-0"]).entries) == 12
    assert len(compare([str(runs / "smart*")]).entries) == 4


def test_what_cannot_be_used_is_named(runs: Path) -> None:
    (runs / "smart-0.9-0" / "result.json").unlink()
    (runs / "smart-0.9-1" / "result.json").write_text("{")
    (runs / "smart-0.5-0" / "config.json").write_text("[]")
    result = json.loads((runs / "smart-0.5-1" / "result.json").read_text())
    (runs / "smart-0.5-1" / "result.json").write_text(json.dumps({**result, "verified": False}))
    result = json.loads((runs / "gradual-0.5-1" / "result.json").read_text())
    (runs / "gradual-0.5-1" / "result.json").write_text(json.dumps({**result, "pruned": "high"}))
    (runs / "none").mkdir()
    found = compare([runs, runs / "none", runs / "never"])
    reasons = {folder.name: reason for folder, reason in found.left_out}
    assert reasons["smart-0.9-0"] == "unfinished (no result.json)"
    assert "not readable as JSON" in reasons["smart-0.9-1"]
    assert "config.json is a list of 0; it must be a dictionary" in reasons["smart-0.5-0"]
    assert reasons["smart-0.5-1"] == "result.json: the model is not what its receipt says"
    assert "pruned is 'high'; it must be a number" in reasons["gradual-0.5-1"]
    assert reasons["none"] == "holds no run (no config.json)"
    assert reasons["never"] == "there is no such folder"
    assert len(found.entries) == 7
    assert f"  {runs / 'never'}: there is no such folder" in str(found)


def test_a_repeated_run_does_not_raise_n(runs: Path) -> None:
    made(runs / "again", 0.99, method="smart", sparsity=0.9, seed=0)
    found = compare([runs])
    assert len(found.entries) == 12
    assert "counted once" in found.left_out[0][1]


def test_only_like_is_pooled(tmp_path: Path) -> None:
    made(tmp_path, 0.5, seed=0)
    made(tmp_path, 0.6, seed=1, settings={"ramp": "cubic"})
    made(tmp_path, 0.7, seed=2, search_epochs=3)
    made(tmp_path, 0.8, seed=3, block="2x2")
    made(tmp_path, 0.9, seed=4, sparsity=None, macs=0.5)
    found = compare([tmp_path])
    assert [len(row.entries) for row in found.rows] == [1] * 5
    assert len(found.groups()) == 3
    text = str(found)
    assert "smart(ramp=cubic)" in text
    assert "2 dense + 3 search + 1 fine-tuning epochs" in text
    assert "macs 0.5" in text


def test_settings_that_hardly_differ_are_not_pooled(tmp_path: Path) -> None:
    """Neither as seeds of one row, nor as the same run a second time."""
    for number, change in enumerate(
        [{}, {"lr": 0.10000001}, {"ema": 0.9999999}, {"ema": 0.99999995}, {"settings": {"end": 1.0000001e-3}}]
    ):
        made(tmp_path / str(number), 0.5, seed=0, **change)
    made(tmp_path / "5", 0.5, seed=0, settings={"end": 1.0000002e-3})
    found = compare([tmp_path])
    assert not found.left_out
    assert [len(row.entries) for row in found.rows] == [1] * 6
    made(tmp_path / "6", 0.5, seed=0, sparsity=0.90000001)
    made(tmp_path / "7", 0.5, seed=0, sparsity=0.90000002)
    found = compare([tmp_path / "6", tmp_path / "7"])
    text = str(found)
    assert "0.90000001 " in text
    assert "0.90000002 " in text
    lines, _ = markdown(found.to_json()["rows"])
    assert "| sparsity 0.90000001 | sparsity 0.90000002 |" in lines[0]
    text = comparison_page(found, [])
    assert "90.000001 % of blocks" in text
    assert "90.000002 % of blocks" in text


def test_protocol_forgets_only_where_it_ran(tmp_path: Path) -> None:
    config = asdict(small_config(tmp_path))
    same = {**config, "out": "x", "dense": "y", "device": "cuda", "seed": 3, "checkpoint_seconds": 1}
    assert protocol(config) == protocol(same)
    for name, value in (("lr", 0.3), ("floor", 0.1), ("skip", ["a*"]), ("amp", "bf16"), ("schedule_over", "pruning")):
        assert protocol({**config, name: value}) != protocol(config), name


def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(tmp_path), str(tmp_path / "none*")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("smartprune: there is nothing to compare; give folders of finished runs (")
    with pytest.raises(SmartpruneError, match="unfinished"):
        read_entry(tmp_path)


def test_files(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in ("a.csv", "a.json", "a.svg")]
    assert run_cli("compare", str(runs), "--csv", names[0], "--json", names[1], "--plot", names[2]) == 0
    captured = capsys.readouterr()
    assert captured.err == "".join(f"written to {name}\n" for name in names)
    assert captured.out.startswith("digits(width=4)")
    with open(names[0], newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 12
    assert {line["method"] for line in lines} == {"smart", "magnitude", "gradual"}
    assert float(lines[0]["difference"]) == pytest.approx(-0.3)
    check_rows(json.loads(Path(names[1]).read_text()), names[1])
    words = [element.text for element in ET.parse(names[2]).iter() if element.tag.endswith("text")]
    assert {"smart", "magnitude", "gradual", "dense", "0.5", "0.9", "accuracy, %"} <= set(words)


def test_a_plot_needs_an_ending_it_knows(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(runs), "--plot", "a.pdf") == 2
    assert "ends in .svg or .png" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_png_without_matplotlib(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(runs), "--plot", str(tmp_path / "a.png")) == 1
    assert "run: pip install matplotlib" in capsys.readouterr().err


def test_png(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run_cli("compare", str(runs), "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_chart_of_one_point_and_odd_names() -> None:
    chart = Chart("<a> & b", "x", "y", (Series("m" * 90, (Point(0.9, 50.0),)), Series("n", (Point(0.9, 50.0, 0.0),))))
    drawn = ET.fromstring(svg([chart, chart]))
    assert drawn.attrib["height"] == "860"
    assert "<a> & b" in [element.text for element in drawn.iter()]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (97.1, 99.9), (-3, 250), (5, 5), (0.1, 0.1001)])
def test_ticks_hold_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
    assert 2 <= len(marks) <= 9


def test_record(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records" / "tiny"
    assert run_cli("compare", str(runs), "--record", str(folder)) == 2
    assert "--record needs --note" in capsys.readouterr().err
    (runs / "sweep.json").write_text(json.dumps({"commands": ["smartprune sweep --out runs"], "sources": ["abc"]}))
    assert run_cli("compare", str(runs), "--record", str(folder), "--note", "Shows nothing at all.") == 0
    data = json.loads((folder / "result.json").read_text())
    assert len(check_rows(data, "result")) == 6
    assert data["commands"][0] == "smartprune sweep --out runs"
    settings = json.loads((folder / "config.json").read_text())
    assert settings["shared"]["block"] == "4x2"
    assert len(settings["runs"]) == 12
    assert {"method", "sparsity", "seed", "out"} <= set(settings["runs"][0])
    assert str(tmp_path) not in (folder / "config.json").read_text()
    page = (folder / "README.md").read_text()
    assert "Shows nothing at all." in page
    assert "- source of the runs: abc" in page
    assert "| smart | 91.00 ± 1.41 | 61.00 ± 1.41 (-30.00) | 51.00 ± 1.41 (-40.00) |" in page
    assert run_cli("compare", str(runs), "--record", str(tmp_path / "No Name"), "--note", "x") == 1


def test_budgets_in_cycles(tmp_path: Path) -> None:
    made(tmp_path / "runs", 0.8, sparsity=None, cycles=0.3)
    made(tmp_path / "runs", 0.7, sparsity=0.5)
    page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
    assert run_cli("compare", str(tmp_path / "runs"), "--html", str(page), "--plot", str(plot)) == 0
    assert "30 % of NPU cycles" in page.read_text()
    assert "share of NPU cycles removed" in plot.read_text()
    assert "share of blocks removed" in plot.read_text()


@pytest.mark.parametrize("damage", [{"sparsity": "abc"}, {"sparsity": [0.9]}, {"include": [1]}, {"settings": 3}])
def test_one_damaged_run_stops_nothing(runs: Path, damage: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    broken = made(runs, 0.1, sparsity=0.7)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, **damage}))
    assert run_cli("compare", str(runs)) == 0
    assert str(broken) in "".join(capsys.readouterr())


def test_a_record_does_not_go_over_a_run(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = made(tmp_path, 0.5)
    before = (victim / "config.json").read_text()
    assert run_cli("compare", str(runs), "--record", str(victim), "--note", "n") == 1
    assert "holds no record" in capsys.readouterr().err
    assert (victim / "config.json").read_text() == before
    for note in ("first", "second"):  # a record grows
        assert run_cli("compare", str(runs), "--record", str(tmp_path / "record"), "--note", note) == 0
