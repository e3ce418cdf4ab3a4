"""Records that ``smartprune compare --record`` writes."""

from __future__ import annotations

import json
import statistics
from contextlib import suppress
from pathlib import Path

import pytest

from helpers.finished_runs import write_run
from helpers.training_jobs import run_cli
from smartprune import SmartpruneError
from smartprune.experiments.compare.identity import row_keys
from smartprune.experiments.compare.markdown import table_lines
from smartprune.experiments.compare.record import check_rows, load_rows


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


ROW = {
    "model": "m", "data": "d", "method": "smart", "block": "8x8", "sparsity": 0.5, "protocol": "p", "metric": "accuracy",
    "unit": "share", "values": [0.5, 0.7], "mean": 0.6, "std": 0.0, "n": 2, "seeds": [0, 1], "settings": {},
    "dense": {"values": [0.8, 0.8], "mean": 0.8, "std": 0.0, "n": 2}, "macs_left": [0.1, 0.2],
}  # fmt: skip
WRONG: list[object] = [None, True, -1, 10**400, "x", "", [], {}, [1, "a"], {"a": 1}, [[[]]], 0.25]


@pytest.mark.parametrize("name", sorted(ROW))
def test_records_with_wrong_types_raise_our_error(name: str, tmp_path: Path) -> None:
    """A value is either accepted or refused; no other exception leaves the reader or the table."""
    row = ROW | {"std": statistics.stdev(ROW["values"])}  # type: ignore[call-overload]
    replaced: list[dict[str, object]] = [{**row, name: value} for value in WRONG]
    if isinstance(row[name], dict):
        inner = row[name]
        replaced += [{**row, name: {**inner, key: value}} for key in inner for value in WRONG]  # type: ignore[dict-item]
        replaced += [{**row, name: {key: inner[key] for key in inner if key != lost}} for lost in inner]  # type: ignore[attr-defined]
    for wrong in [*replaced, {key: value for key, value in row.items() if key != name}]:
        (tmp_path / "result.json").write_text(json.dumps({"rows": [row, wrong]}))
        for show in ({}, {"show": "macs_left"}):
            with suppress(SmartpruneError):
                rows = load_rows(tmp_path)
                table_lines(rows, show, "")
        with suppress(SmartpruneError):
            for number, one in enumerate(load_rows(tmp_path)):
                row_keys(one, f"rows[{number}]")
    (tmp_path / "result.json").write_text(json.dumps({"rows": [row]}))
    assert table_lines(load_rows(tmp_path), {}, "")[2].startswith("| smart |")
