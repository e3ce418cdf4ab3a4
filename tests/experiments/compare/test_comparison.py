"""Which runs are pooled in a row, and which are kept apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.finished_runs import VERSIONS, write_run
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.markdown import markdown
from smartprune.experiments.compare.page import comparison_page
from smartprune.experiments.compare.record import check_rows


def test_json_has_the_rows_of_a_record(runs: Path) -> None:
    data = compare([runs]).to_json()
    rows = check_rows(data, "here")
    assert len(rows) == 6
    assert rows[0]["method"] == "smart"
    assert rows[0]["seeds"] == [0, 1]
    assert rows[0]["values"] == pytest.approx([0.6, 0.62])
    assert rows[0]["dense"]["values"] == pytest.approx([0.9, 0.92])
    assert rows[0]["difference"] == pytest.approx(-0.3)
    assert data["versions"] == [VERSIONS]


def test_a_repeated_run_does_not_raise_n(runs: Path) -> None:
    write_run(runs / "again", 0.99, method="smart", sparsity=0.9, seed=0)
    comparison = compare([runs])
    assert len(comparison.runs) == 12
    assert "counted once" in comparison.left_out[0][1]


def test_only_runs_that_differ_in_their_seed_are_pooled(tmp_path: Path) -> None:
    write_run(tmp_path, 0.5, seed=0)
    write_run(tmp_path, 0.6, seed=1, settings={"ramp": "cubic"})
    write_run(tmp_path, 0.7, seed=2, search_epochs=3)
    write_run(tmp_path, 0.8, seed=3, block="2x2")
    write_run(tmp_path, 0.9, seed=4, sparsity=None, macs=0.5)
    comparison = compare([tmp_path])
    assert [len(row.runs) for row in comparison.rows] == [1] * 5
    assert len(comparison.groups()) == 3
    text = str(comparison)
    assert "smart(ramp=cubic)" in text
    assert "2 dense + 3 search + 1 fine-tuning epochs" in text
    assert "macs 0.5" in text


def test_settings_with_a_tiny_difference_are_not_pooled(tmp_path: Path) -> None:
    """They are neither seeds of one row nor a repetition of the same run."""
    for number, change in enumerate(
        [{}, {"lr": 0.10000001}, {"ema": 0.9999999}, {"ema": 0.99999995}, {"settings": {"end": 1.0000001e-3}}]
    ):
        write_run(tmp_path / str(number), 0.5, seed=0, **change)
    write_run(tmp_path / "5", 0.5, seed=0, settings={"end": 1.0000002e-3})
    comparison = compare([tmp_path])
    assert not comparison.left_out
    assert [len(row.runs) for row in comparison.rows] == [1] * 6


def test_sparsities_with_a_tiny_difference_are_shown_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "6", 0.5, seed=0, sparsity=0.90000001)
    write_run(tmp_path / "7", 0.5, seed=0, sparsity=0.90000002)
    comparison = compare([tmp_path / "6", tmp_path / "7"])
    text = str(comparison)
    assert "0.90000001 " in text
    assert "0.90000002 " in text
    lines, _ = markdown(comparison.to_json()["rows"])
    assert "| sparsity 0.90000001 | sparsity 0.90000002 |" in lines[0]
    text = comparison_page(comparison, [])
    assert "90.000001 % of blocks" in text
    assert "90.000002 % of blocks" in text
