"""The tables of a comparison on the terminal."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from helpers.finished_runs import write_macs_left, write_run
from helpers.pruned_models import model_and_receipt
from helpers.training_jobs import run_cli
from smartprune import SmartpruneError
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.markdown import markdown
from smartprune.experiments.compare.page import comparison_page
from smartprune.experiments.compare.panels import comparison_charts
from smartprune.experiments.compare.table import comparison_text
from smartprune.methods import METHODS


def test_table_has_methods_by_sparsity(runs: Path) -> None:
    lines = comparison_text(compare([runs]), ascii_only=False).splitlines()
    title = "digits(width=4), resnet8, blocks of 4x2: accuracy in %, test split, after the last epoch, by requested budget"
    assert " ".join(lines[:2]) == title
    start = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert lines[start].split() == ["method", "dense", "sparsity", "0.5", "diff", "n", "sparsity", "0.9", "diff", "n"]
    body = [line.split() for line in lines[start + 1 :]]
    assert [line[0] for line in body] == [name for name in METHODS if name in ("smart", "magnitude", "gradual")]
    assert body[0] == ["smart", "91.00", "±", "1.41", "61.00", "±", "1.41", "-30.00", "2", "51.00", "±", "1.41", "-40.00", "2"]


def test_macs_left_have_a_table_of_their_own(runs: Path, tmp_path: Path) -> None:
    """The same blocks budget leaves more MACs to one method than to another."""
    for folder in runs.iterdir():
        method, sparsity, seed = folder.name.split("-")
        if method != "magnitude" or sparsity == "0.5":  # one row has no count of MACs
            write_macs_left(folder, 1000, {"magnitude": 300, "gradual": 200, "smart": 100}[method] + 10 * int(seed))
    comparison = compare([runs])
    lines = comparison_text(comparison, ascii_only=False).splitlines()
    start = next(i for i, line in enumerate(lines) if line == "MACs of the pruned layers left, in %")
    assert lines[start + 1].split() == ["method", "sparsity", "0.5", "sparsity", "0.9"]
    assert [line.split() for line in lines[start + 2 :]] == [
        ["smart", "10.50", "±", "0.71", "10.50", "±", "0.71"],
        ["magnitude", "30.50", "±", "0.71", "-"],
        ["gradual", "20.50", "±", "0.71", "20.50", "±", "0.71"],
    ]
    rows = comparison.to_json()["rows"]
    assert [row.get("macs_left") for row in rows] == [[0.1, 0.11], [0.1, 0.11], [0.3, 0.31], None, [0.2, 0.21], [0.2, 0.21]]
    table, caption = markdown(rows, {"show": "macs_left", "method": "[sg]*"})
    assert table[2] == "| smart | 10.50 ± 0.71 | 10.50 ± 0.71 |"
    assert caption.endswith("MACs of the pruned layers left in %, mean ± standard deviation, n = 2.")
    with pytest.raises(SmartpruneError, match="only these can replace the metric: macs_left"):
        markdown(rows, {"show": "seconds"})
    with pytest.raises(SmartpruneError, match="no row has"):
        markdown(rows, {"show": "macs_left", "method": "none"})
    for wrong in (None, "0.1", float("nan")):
        with pytest.raises(SmartpruneError, match=r"smart: macs_left is .*; it must be a list of numbers"):
            markdown([rows[0] | {"macs_left": [0.1, wrong]}], {"show": "macs_left"})
    page = tmp_path / "page.html"
    assert run_cli("compare", str(runs), "--html", str(page), "--csv", str(tmp_path / "a.csv")) == 0
    assert "MACs of the pruned layers left, %" in page.read_text()
    lines_of_csv = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert {line["macs_left"] for line in lines_of_csv} == {"0.1", "0.11", "0.2", "0.21", "0.3", "0.31", ""}


def test_macs_left_fit_the_width_at_many_sparsities(tmp_path: Path) -> None:
    """Also in plain ASCII, where every number is one column wider."""
    for sparsity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        for seed in (0, 1):
            settings = {"start": 1.0, "ramp": "cubic", "mask_type": "stochastic"}
            folder = write_run(tmp_path, 0.5, sparsity=sparsity, seed=seed, settings=settings)
            write_macs_left(folder, 1000, 100 + seed)
    lines = comparison_text(compare([tmp_path]), ascii_only=True).splitlines()
    starts = [number for number, line in enumerate(lines) if line == "MACs of the pruned layers left, in %"]
    assert len(starts) == 2
    assert max(len(line) for line in lines[starts[0] :]) <= 100


def test_texts_of_a_csv_file_do_not_start_like_formulas(tmp_path: Path) -> None:
    """A spreadsheet runs cells that start with =, +, - or @. Negative numbers stay numbers."""
    for start in "=+-@":
        path = write_run(tmp_path, 0.5, dense=0.9, seed=ord(start)) / "config.json"
        changes = {"model": f"{start}1+1", "settings": {"start": f"{start}x"}, "augment": "\x1b[2J\u202e", "floor": f"{start}1"}
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    comparison = compare([tmp_path])
    lines = list(csv.DictReader(comparison.csv().splitlines()))
    assert sorted(line["model"] for line in lines) == ["'+1+1", "'-1+1", "'=1+1", "'@1+1"]
    for line in lines:
        for name, cell in line.items():
            assert not cell.startswith(("=", "+", "@")), (name, cell)
            assert cell.isprintable()
            assert not cell.startswith("-") or float(cell) < 0
        assert float(line["difference"]) == pytest.approx(-0.4)
    assert "\x1b" not in str(comparison)


def test_the_reached_sparsity_is_that_of_the_receipt(tmp_path: Path) -> None:
    _, receipt = model_and_receipt("unet", (4, 8), 0.6)
    for seed in (0, 1):
        folder = write_run(tmp_path, 0.5, seed=seed, sparsity=0.6)
        receipt.save(folder / "receipt.json")
    comparison = compare([tmp_path])
    reached = receipt.blocks.removed / receipt.blocks.total
    assert comparison.rows[0].blocks_removed == [reached, reached]
    assert comparison.to_json()["rows"][0]["blocks_removed"] == [reached, reached]
    assert {line["blocks_removed"] for line in csv.DictReader(comparison.csv().splitlines())} == {str(reached)}
    page = comparison_page(comparison, comparison_charts(comparison))
    assert "Sparsity (blocks of the pruned layers), %" in page
    assert f">{100 * reached:.2f}<" in page


def test_tables_of_runs_that_were_trained_in_different_ways_have_different_titles(tmp_path: Path) -> None:
    for epochs in (4, 8):
        write_run(tmp_path, 0.5, search_epochs=epochs, ema=0.9)
    write_run(tmp_path, 0.5, block="8x8")
    titles = list(compare([tmp_path]).titles().values())
    assert len(set(titles)) == 3
    assert sum("4 search" in title for title in titles) == 1
    assert not any("ema" in title for title in titles)  # the same in both
    assert "digits(width=4), resnet8, blocks of 8x8" in titles
