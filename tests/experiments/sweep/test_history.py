"""The history of a sweep: its commands and commits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smartprune.errors import SmartpruneError
from smartprune.experiments.sweep import history
from smartprune.experiments.sweep.history import add_to_history, read_history


def test_commands_and_commits_are_kept_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_history(tmp_path) == {"commands": [], "sources": []}
    for commit, command in (("c1", "first"), ("c1", "second"), ("c2", "first"), (None, "third")):
        monkeypatch.setattr(history, "git_commit", lambda commit=commit: commit)
        add_to_history(tmp_path, command)
    assert read_history(tmp_path) == {"commands": ["first", "second", "third"], "sources": ["c1", "c2"]}


def test_entries_of_other_types_are_dropped_and_damage_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"commands": ["a", 3, None], "sources": "c", "more": 1}))
    assert read_history(tmp_path) == {"commands": ["a"], "sources": []}
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(SmartpruneError, match=r"sweep\.json: not readable as JSON"):
        read_history(tmp_path)
