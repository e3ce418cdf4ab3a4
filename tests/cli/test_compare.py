"""``smartprune compare``: its output, its files and its exit codes."""

from __future__ import annotations

import csv
import importlib.util
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from helpers.finished_runs import write_grid_of_runs, write_run
from helpers.training_jobs import run_cli
from smartprune.experiments.compare.record import check_rows


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_grid_of_runs(tmp_path)


def test_no_finished_run_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(tmp_path), str(tmp_path / "none*")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("smartprune: nothing to compare; give folders of finished runs (")


def test_csv_json_and_plot_are_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(tmp_path / name) for name in ("a.csv", "a.json", "a.svg")]
    assert run_cli("compare", str(runs), "--csv", names[0], "--json", names[1], "--plot", names[2]) == 0
    captured = capsys.readouterr()
    assert captured.err == "".join(f"written to {name}\n" for name in names)
    assert captured.out.startswith("digits(width=4)")
    with open(names[0], newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["method"] for row in rows} == {"smart", "magnitude", "gradual"}
    assert float(rows[0]["difference"]) == pytest.approx(-0.3)
    check_rows(json.loads(Path(names[1]).read_text()), names[1])
    texts = [element.text for element in ET.parse(names[2]).iter() if element.tag.endswith("text")]
    assert {"smart", "magnitude", "gradual", "dense", "0.5", "0.9", "accuracy, %"} <= set(texts)


def test_plot_refuses_other_formats(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(runs), "--plot", "a.pdf") == 2
    assert "must end in .svg or .png" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_png_without_matplotlib_says_what_to_install(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("compare", str(runs), "--plot", str(tmp_path / "a.png")) == 1
    assert "run: pip install matplotlib" in capsys.readouterr().err


def test_png_is_written_with_matplotlib(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run_cli("compare", str(runs), "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_budgets_in_cycles_have_their_own_panel(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 0.8, sparsity=None, cycles=0.3)
    write_run(tmp_path / "runs", 0.7, sparsity=0.5)
    page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
    assert run_cli("compare", str(tmp_path / "runs"), "--html", str(page), "--plot", str(plot)) == 0
    assert "30 % of NPU cycles" in page.read_text()
    assert "share of NPU cycles removed" in plot.read_text()
    assert "share of blocks removed" in plot.read_text()


@pytest.mark.parametrize("damage", [{"sparsity": "abc"}, {"sparsity": [0.9]}, {"include": [1]}, {"settings": 3}])
def test_a_damaged_run_does_not_stop_the_comparison(runs: Path, damage: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    damaged_run = write_run(runs, 0.1, sparsity=0.7)
    config = json.loads((damaged_run / "config.json").read_text())
    (damaged_run / "config.json").write_text(json.dumps({**config, **damage}))
    assert run_cli("compare", str(runs)) == 0
    assert str(damaged_run) in "".join(capsys.readouterr())
