"""Records: a folder per claimed number, with its result, its settings, where it was made, and what it does not show."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SmartpruneError
from ...files import parse_json, read_limited, write_atomic
from ...training.config import BUDGETS
from .names import method_name, plain

if TYPE_CHECKING:
    from . import Comparison

RESULT, CONFIG, README = "result.json", "config.json", "README.md"
NEEDED = ("model", "data", "method", "block", "sparsity", "protocol", "metric", "values", "mean", "std", "n")
COLUMNS = ("model", "data", "block", *BUDGETS, "protocol", "metric")  # what may tell columns apart
BESIDES = {"macs_left": "MACs left"}  # what else than its metric a row of runs may have
LARGEST_FILE = 64 << 20
NOT_YET = "not recorded yet"


def check_rows(data: object, where: str) -> list[dict[str, Any]]:
    """The rows of a result file, once they have what a row needs and their mean, std and n follow from their values."""
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise SmartpruneError(f"{where}: has no rows; a result file is a JSON object with a list of them")
    for number, row in enumerate(rows):
        place = f"{where}: rows[{number}]"
        missing = [name for name in NEEDED if not isinstance(row, dict) or name not in row]
        if missing:
            raise SmartpruneError(f"{place}: lacks {', '.join(missing)}")
        _check_numbers(row, place)
        if isinstance(row.get("dense"), dict):
            _check_numbers(row["dense"], f"{place}: dense")
    return rows


def _check_numbers(row: Mapping[str, Any], place: str) -> None:
    values = row["values"]
    if not isinstance(values, list) or not values or not all(_is_number(value) for value in values):
        raise SmartpruneError(f"{place}: values is {values!r}; it must be a list of numbers")
    if row["n"] != len(values):
        raise SmartpruneError(f"{place}: n is {row['n']}, but there are {len(values)} values")
    mean = statistics.fmean(values)
    if not _is_number(row["mean"]) or not math.isclose(row["mean"], mean, rel_tol=1e-9, abs_tol=1e-12):
        raise SmartpruneError(f"{place}: mean is {row['mean']}, but that of the values is {mean}")
    std = statistics.stdev(values) if len(values) > 1 else None
    agree = row["std"] is None if std is None else _is_number(row["std"])
    if not agree or (std is not None and not math.isclose(row["std"], std, rel_tol=1e-6, abs_tol=1e-12)):
        raise SmartpruneError(f"{place}: std is {row['std']}, but that of the values is {std}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a record. Methods go by the names that today's defaults give them, where a row has all settings: the name in
    the file was made with those of its day."""
    path = folder / RESULT
    rows = check_rows(parse_json(read_limited(path, LARGEST_FILE), str(path)), str(path))
    return [_renamed(row) if isinstance(row.get("settings"), dict) else row for row in rows]


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"method": method_name(str(row["method"]).partition("(")[0], row["settings"])}


def markdown(rows: Sequence[Mapping[str, Any]], only: Mapping[str, str] | None = None) -> tuple[list[str], str]:
    """A table, a row per method, and a line that says what all its numbers have in common.

    Columns are told apart by whatever differs: sparsity, model, data, protocol. ``only`` keeps rows by globs, and shows what
    ``show`` names (macs_left) in place of the metric.
    """
    only = dict(only or {})
    shown = only.pop("show", None)
    if shown not in (None, *BESIDES):
        raise SmartpruneError(f"show={shown}: what can be shown in place of the metric is {', '.join(BESIDES)}")
    rows = [row for row in rows if all(fnmatchcase(str(row.get(k)), glob) for k, glob in only.items())]
    if shown:
        rows = [_beside(row, shown) for row in rows if isinstance(row.get(shown), list) and row[shown]]
    if not rows:
        asked = " ".join(f"{key}={glob}" for key, glob in (only | ({shown: "*"} if shown else {})).items())
        raise SmartpruneError(f"no row has {asked}")
    varying = [name for name in COLUMNS if len({json.dumps(row.get(name)) for row in rows}) > 1]
    columns = list(dict.fromkeys(tuple(row.get(name) for name in varying) for row in rows))
    if varying == ["sparsity"]:
        columns.sort(key=lambda column: (column[0] is None, column[0] or 0))
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    counts = {row["n"] for row in rows}
    dense = _dense(rows)
    header = ["method", *(["dense"] if dense else []), *(_heading(varying, column) for column in columns)]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for method in methods:
        line = [method, *([dense[method]] if dense else [])]
        for column in columns:
            found = [r for r in rows if r["method"] == method and tuple(r.get(name) for name in varying) == column]
            if len(found) > 1:
                raise SmartpruneError(f"{method}: {len(found)} rows fall into one place of the table; choose by key=glob")
            line.append(_cell(found[0], len(counts) > 1) if found else "-")
        lines.append(line)
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines], _common(rows, counts)


def _beside(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A row of another number that its runs have, one for each."""
    from . import summary

    if not all(map(_is_number, row[name])):
        raise SmartpruneError(f"{row['method']}: {name} is {row[name]!r}; it must be a list of numbers")
    plain = {key: value for key, value in row.items() if key not in ("dense", "difference")}
    return {**plain, "metric": BESIDES[name], "unit": "share", **summary(row[name])}


def _dense(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What every method started from: one number, or from the lowest to the highest where one dense model was judged several times.
    Nothing unless all rows tell it, and where they are of several models."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row.get("dense"), dict):
            return {}
        found.setdefault(str(row["method"]), {})[_cell({**row["dense"], "unit": row.get("unit")}, False)] = row["dense"]["mean"]
    same = all(len({json.dumps(row.get(name)) for row in rows}) == 1 for name in ("model", "data", "protocol", "metric"))
    if not same and any(len(shown) > 1 for shown in found.values()):
        return {}
    ordered = {method: sorted(shown, key=lambda text: shown[text]) for method, shown in found.items()}
    return {method: " to ".join(dict.fromkeys((texts[0], texts[-1]))) for method, texts in ordered.items()}


def _heading(names: Sequence[str], values: Sequence[Any]) -> str:
    shown = [
        f"{name} {plain(value)}" if isinstance(value, (int, float)) else str(value)
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    return ", ".join(shown) or "value"


def _cell(row: Mapping[str, Any], with_n: bool) -> str:
    percent = row.get("unit") == "share"

    def show(value: float) -> str:
        return f"{100 * value:.2f}" if percent else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"

    out = show(row["mean"])
    if row["std"] is not None:
        out += f" ± {show(row['std'])}"
    elif _is_number(row.get("low")) and _is_number(row.get("high")):
        out += f" [{show(row['low'])}, {show(row['high'])}]"
    if percent and _is_number(row.get("difference")):
        out += f" ({100 * row['difference']:+.2f})"
    return out + (f", n={row['n']}" if with_n else "")


def _common(rows: Sequence[Mapping[str, Any]], counts: set[Any]) -> str:
    parts = []
    for name in ("data", "model", "block", *BUDGETS, "protocol"):
        values = {json.dumps(row.get(name)): row.get(name) for row in rows}
        value = next(iter(values.values()))
        if len(values) == 1 and value not in (None, "", "-"):
            parts.append({"block": f"blocks of {value}", **{kind: f"{kind} {value}" for kind in BUDGETS}}.get(name, str(value)))
    shares = {str(row["metric"]) for row in rows if row.get("unit") == "share"}
    names = list(dict.fromkeys(str(row["metric"]) for row in rows))
    mixed = 0 < len(shares) < len(names)
    metrics = ", ".join(f"{name} in %" if mixed and name in shares else name for name in names)
    if rivals := list(dict.fromkeys(str(row["to"]) for row in rows if "to" in row)):
        metrics += f", against {' or '.join(rivals)}"
    if shares and not mixed:
        metrics += " in %" + (" (difference to dense)" if any("difference" in row for row in rows) else "")
    if any(row["std"] is not None for row in rows):
        metrics += ", mean ± standard deviation"
    if any("low" in row for row in rows):
        metrics += ", median [quartiles]"
    if len(counts) == 1 and counts != {1}:
        metrics += f", n = {next(iter(counts))}"
    return "; ".join([*parts, metrics]) + "."


def write_record(folder: Path, found: Comparison, note: str, commands: Sequence[str], sources: Sequence[str] = ()) -> None:
    """A comparison of runs as a record; ``sources`` are the commits that made the runs, where they are known."""
    configs = [_relative({**entry.config, "out": entry.folder.name}) for entry in found.entries]
    shared = {k: v for k, v in configs[0].items() if all(k in c and c[k] == v for c in configs)}
    settings = {"shared": shared, "runs": [{k: v for k, v in c.items() if k not in shared} for c in configs]}
    result = found.to_json()
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
    """Writes the three files of a record. The table in its README is kept up to date by ``records/tables.py``."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", folder.name):
        raise SmartpruneError(f"{folder.name!r} is no name for a record; use small letters, digits and dashes")
    if not note.strip():
        raise SmartpruneError("a record needs a note: what does the number not show?")
    rows = check_rows(result, str(folder / RESULT))
    if folder.is_dir() and any(folder.iterdir()) and "rows" not in _peek(folder / RESULT):
        raise SmartpruneError(f"{folder} is not empty and holds no record; give another folder (a record is written anew)")
    commit = git_commit()
    result = {"note": note, "recorded_at": commit, "commands": list(commands), **result}
    page = [f"# {folder.name}", "", note, ""]
    page += [f"- made by: `{command}`" for command in commands]
    page += [f"- on: {machine}" for machine in machines]
    page += [f"- source of the runs: {source}" for source in result.get("sources", ())]
    page += [f"- recorded at: {commit}"] if commit else []
    counts = sorted({row.get("repeats", row["n"]) for row in rows})
    shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    page += [f"- n: {shown} per number; each value is in [{RESULT}]({RESULT})"]
    page += [f"- settings: [{CONFIG}]({CONFIG})", "", f"<!-- table: {folder.name} -->"]
    page += [*table_lines(rows, {}, ""), "<!-- /table -->", ""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"{folder}: cannot be made ({error.strerror or error})") from None
    write_atomic(folder / RESULT, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(folder / CONFIG, (json.dumps(settings, indent=1, allow_nan=False) + "\n").encode())
    write_atomic(folder / README, "\n".join(page).encode())


def _peek(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_limited(path, LARGEST_FILE), str(path))
    except SmartpruneError:
        return {}
    return found if isinstance(found, dict) else {}


def table_lines(rows: Sequence[Mapping[str, Any]], only: Mapping[str, str], link: str) -> list[str]:
    """What stands between the markers of a page."""
    lines, common = markdown(rows, only)
    return [*lines, "", common + (f" [{link}]({link})" if link else "")]


def git_commit() -> str | None:
    """The commit of this source, if it lies in a git repository."""
    here = Path(__file__).parent
    try:
        told = [
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", "."))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return told[0] + (" with changes that were not committed yet" if told[1] else "")


def _relative(value: Any) -> Any:
    """The same without the folders of the machine it was made on."""
    if isinstance(value, dict):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
