"""Records that ``smartprune compare --record`` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.finished_runs import write_run
from helpers.training_jobs import run_cli
from smartprune.experiments.compare.record import check_rows


def test_record_has_result_settings_and_readme(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    readme = (folder / "README.md").read_text()
    assert "Shows nothing at all." in readme
    assert "- source of the runs: abc" in readme
    assert "| smart | 91.00 ± 1.41 | 61.00 ± 1.41 (-30.00) | 51.00 ± 1.41 (-40.00) |" in readme
    assert run_cli("compare", str(runs), "--record", str(tmp_path / "No Name"), "--note", "x") == 1


def test_record_replaces_a_record_but_no_other_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(tmp_path, 0.5)
    before = (other / "config.json").read_text()
    assert run_cli("compare", str(runs), "--record", str(other), "--note", "n") == 1
    assert "holds no record" in capsys.readouterr().err
    assert (other / "config.json").read_text() == before
    for note in ("first", "second"):
        assert run_cli("compare", str(runs), "--record", str(tmp_path / "record"), "--note", note) == 0
