"""Records: one folder per published number, with its result, its settings, its machine and a note on its limits."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...budgets import budget_names
from ...errors import SmartpruneError
from ...files import parse_json, read_limited, write_atomic
from ...run_files import CONFIG, RESULT
from .comparison import Comparison
from .labels import method_label
from .markdown import is_number, table_lines

README = "README.md"
REQUIRED = ("model", "data", "method", "block", "sparsity", "protocol", "metric", "values", "mean", "std", "n")
TEXTS = ("model", "data", "method", "block", "protocol", "metric")
MAX_FILE_BYTES = 64 << 20


def check_rows(data: object, where: str) -> list[dict[str, Any]]:
    """The rows of a result file. Raises unless they are complete and their mean, std and n agree with their values."""
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise SmartpruneError(f"{where}: has no rows; a result file is a JSON object with a list of rows")
    for number, row in enumerate(rows):
        place = f"{where}: rows[{number}]"
        missing = [name for name in REQUIRED if not isinstance(row, dict) or name not in row]
        if missing:
            raise SmartpruneError(f"{place}: lacks {', '.join(missing)}")
        _check_types(row, place)
        _check_statistics(row, place)
        if isinstance(row.get("dense"), dict):
            _check_statistics(row["dense"], f"{place}: dense")
    return rows


def _check_types(row: Mapping[str, Any], place: str) -> None:
    for name in TEXTS:
        if not isinstance(row[name], str):
            raise SmartpruneError(f"{place}: {name} is {row[name]!r}; it must be a string")
    for name in budget_names():
        if not (row.get(name) is None or isinstance(row[name], str) or is_number(row[name])):
            raise SmartpruneError(f"{place}: {name} is {row[name]!r}; it must be a number, a string or null")


def _check_statistics(row: Mapping[str, Any], place: str) -> None:
    if missing := [name for name in ("values", "mean", "std", "n") if name not in row]:
        raise SmartpruneError(f"{place}: lacks {', '.join(missing)}")
    values = row["values"]
    if not isinstance(values, list) or not values or not all(map(is_number, values)):
        raise SmartpruneError(f"{place}: values is {values!r}; it must be a list of numbers")
    if row["n"] != len(values):
        raise SmartpruneError(f"{place}: n is {row['n']}, but there are {len(values)} values")
    mean = statistics.fmean(values)
    if not is_number(row["mean"]) or not math.isclose(row["mean"], mean, rel_tol=1e-9, abs_tol=1e-12):
        raise SmartpruneError(f"{place}: mean is {row['mean']}, but the mean of the values is {mean}")
    std = statistics.stdev(values) if len(values) > 1 else None
    same_type = row["std"] is None if std is None else is_number(row["std"])
    if not same_type or (std is not None and not math.isclose(row["std"], std, rel_tol=1e-6, abs_tol=1e-12)):
        raise SmartpruneError(f"{place}: std is {row['std']}, but the standard deviation of the values is {std}")


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a record.

    Where a row has the settings of its method, the method's label is made from them. The label in the file depends on the
    defaults at the time when the record was written.
    """
    path = folder / RESULT
    rows = check_rows(parse_json(read_limited(path, MAX_FILE_BYTES), str(path)), str(path))
    return [_with_current_label(row) if isinstance(row.get("settings"), dict) else row for row in rows]


def _with_current_label(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"method": method_label(str(row["method"]).partition("(")[0], row["settings"])}


def write_record(folder: Path, comparison: Comparison, note: str, commands: Sequence[str], sources: Sequence[str] = ()) -> None:
    """Writes a comparison as a record. ``sources`` are the commits of the code that trained the runs, as far as known."""
    configs = [_without_folders({**run.config, "out": run.folder.name}) for run in comparison.runs]
    shared = {k: v for k, v in configs[0].items() if all(k in c and c[k] == v for c in configs)}
    settings = {"shared": shared, "runs": [{k: v for k, v in c.items() if k not in shared} for c in configs]}
    result = comparison.to_json()
    machines = [", ".join(f"{name} {value}" for name, value in versions.items() if value) for versions in result["versions"]]
    save_record(folder, {"sources": list(sources), **result}, settings, note, commands, machines)


def save_record(
    folder: Path,
    result: Mapping[str, Any],
    settings: Mapping[str, Any],
    note: str,
    commands: Sequence[str],
    machines: Sequence[str],
) -> None:
    """Writes the three files of a record. ``records/tables.py`` keeps the table in its README up to date."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", folder.name):
        raise SmartpruneError(f"{folder.name!r} is not a valid name for a record; use lower-case letters, digits and dashes")
    if not note.strip():
        raise SmartpruneError("a record needs a note: say what its numbers do not show")
    rows = check_rows(result, str(folder / RESULT))
    if folder.is_dir() and any(folder.iterdir()) and not _holds_record(folder):
        raise SmartpruneError(f"{folder} is not empty and holds no record; give another folder (only a record is overwritten)")
    commit = git_commit()
    result = {"note": note, "recorded_at": commit, "commands": list(commands), **result}
    readme = [f"# {folder.name}", "", note, ""]
    readme += [f"- made by: `{command}`" for command in commands]
    readme += [f"- on: {machine}" for machine in machines]
    readme += [f"- source of the runs: {source}" for source in result.get("sources", ())]
    readme += [f"- recorded at: {commit}"] if commit else []
    counts = sorted({row.get("repeats", row["n"]) for row in rows})
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    readme += [f"- n: {n} per number; each value is in [{RESULT}]({RESULT})"]
    readme += [f"- settings: [{CONFIG}]({CONFIG})", "", f"<!-- table: {folder.name} -->"]
    readme += [*table_lines(rows, {}, ""), "<!-- /table -->", ""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"{folder}: the folder cannot be made ({error.strerror or error})") from None
    write_atomic(folder / RESULT, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(folder / CONFIG, (json.dumps(settings, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(folder / README, "\n".join(readme).encode())


def _holds_record(folder: Path) -> bool:
    path = folder / RESULT
    try:
        data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path))
    except SmartpruneError:
        return False
    return isinstance(data, dict) and "rows" in data


def git_commit() -> str | None:
    """The commit of this source, if it is in a git repository."""
    here = Path(__file__).parent
    try:
        commit, changes = [
            subprocess.run(["git", "-C", str(here), *command], capture_output=True, text=True, check=True).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "."))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + (" with uncommitted changes" if changes else "")


def _without_folders(value: Any) -> Any:
    """The same data, with absolute paths reduced to their last part."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
