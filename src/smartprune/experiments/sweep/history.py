"""The history of a sweep: the commands that started it and the commits of the code that ran."""

from __future__ import annotations

import json
from pathlib import Path

from ...files import parse_json, read_limited, write_atomic
from ..compare.record import git_commit

FILE = "sweep.json"
MAX_FILE_BYTES = 1 << 20


def read_history(folder: Path) -> dict[str, list[str]]:
    """The ``commands`` and the ``sources`` (commits) of the runs in a sweep's folder."""
    path = folder / FILE
    data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path)) if path.exists() else {}
    history: dict[str, list[str]] = {"commands": [], "sources": []}
    for name, entries in history.items():
        stored = data.get(name) if isinstance(data, dict) else None
        entries += [text for text in stored if isinstance(text, str)] if isinstance(stored, list) else []
    return history


def add_to_history(folder: Path, command: str) -> None:
    """Adds a command and the current commit, unless they are in the history already."""
    history = read_history(folder)
    for name, entry in (("commands", command), ("sources", git_commit())):
        if entry and entry not in history[name]:
            history[name].append(entry)
    write_atomic(folder / FILE, (json.dumps(history, indent=1) + "\n").encode())
