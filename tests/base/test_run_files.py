"""The names of the files of a run folder."""

from __future__ import annotations

from smartprune import run_files


def test_no_two_files_share_a_name() -> None:
    names = [
        value
        for name, value in vars(run_files).items()
        if name.isupper() and isinstance(value, str) and name not in ("STAGES", "COLUMNS")
    ]
    names += run_files.DETECTIONS.values()
    assert len(names) > 10
    assert len(set(names)) == len(names)


def test_results_are_protected_and_pages_are_not() -> None:
    assert {run_files.CONFIG, run_files.RESULT, run_files.MODEL, run_files.RECEIPT} <= set(run_files.PROTECTED)
    assert run_files.PAGE not in run_files.PROTECTED


def test_every_stage_has_a_name_and_every_column_is_listed_once() -> None:
    assert set(run_files.STAGE_NAMES) == set(run_files.STAGES)
    assert len(set(run_files.COLUMNS)) == len(run_files.COLUMNS)
    assert set(run_files.POSITION) <= set(run_files.COLUMNS)
