"""Finding and reading the folders of finished runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.finished_runs import write_run
from smartprune import SmartpruneError
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.runs import read_run


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
def test_macs_left_is_none_without_a_valid_count_in_the_receipt(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, 0.5)
    (folder / "receipt.json").write_text(text)
    assert read_run(folder).macs_left is None


def test_an_unfinished_run_raises(tmp_path: Path) -> None:
    with pytest.raises(SmartpruneError, match="unfinished"):
        read_run(tmp_path)


def test_every_run_folder_is_found_once(runs: Path) -> None:
    assert len(compare([runs, runs.parent, str(runs / "smart*"), runs / "smart-0.9-0"]).runs) == 12
    assert len(compare([str(runs / "smart*")]).runs) == 4


def test_unusable_folders_are_listed_with_the_reason(runs: Path) -> None:
    (runs / "smart-0.9-0" / "result.json").unlink()
    (runs / "smart-0.9-1" / "result.json").write_text("{")
    (runs / "smart-0.5-0" / "config.json").write_text("[]")
    result = json.loads((runs / "smart-0.5-1" / "result.json").read_text())
    (runs / "smart-0.5-1" / "result.json").write_text(json.dumps({**result, "verified": False}))
    result = json.loads((runs / "gradual-0.5-1" / "result.json").read_text())
    (runs / "gradual-0.5-1" / "result.json").write_text(json.dumps({**result, "pruned": "high"}))
    (runs / "none").mkdir()
    comparison = compare([runs, runs / "none", runs / "never"])
    reasons = {folder.name: reason for folder, reason in comparison.left_out}
    assert reasons["smart-0.9-0"] == "unfinished (no result.json)"
    assert "JSON" in reasons["smart-0.9-1"]
    assert "config.json is a list of 0; it must be a dictionary" in reasons["smart-0.5-0"]
    assert reasons["smart-0.5-1"] == "result.json: the model does not match its receipt"
    assert "pruned is 'high'; it must be a number" in reasons["gradual-0.5-1"]
    assert reasons["none"] == "not a run folder (no config.json)"
    assert reasons["never"] == "no such folder"
    assert len(comparison.runs) == 7
    assert f"  {runs / 'never'}: no such folder" in str(comparison)
