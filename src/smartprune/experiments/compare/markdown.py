"""Rows of a record as a Markdown table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...budgets import SPARSITY, budget_names
from ...errors import SmartpruneError
from .comparison import summary
from .labels import format_setting
from .outcomes import outcome_lines

OTHER_METRICS = {"macs_left": "MACs of the pruned layers left"}  # what a row may hold besides its metric, one number per run
Row = Mapping[str, Any]


def table_lines(rows: Sequence[Row], filters: Mapping[str, str], link: str) -> list[str]:
    """A table and the line below it, as they stand between the markers of a page."""
    if all(isinstance(row.get("outcome"), str) for row in rows):
        return outcome_lines(rows, link)
    lines, caption = markdown(rows, filters)
    return [*lines, "", caption + (f" [{link}]({link})" if link else "")]


def markdown(rows: Sequence[Row], filters: Mapping[str, str] | None = None) -> tuple[list[str], str]:
    """A table with a row per method, and a caption with what all of its numbers have in common.

    The columns are the fields that differ: sparsity, model, data, protocol. ``filters`` keeps the rows whose fields match a
    glob; ``show=macs_left`` in it shows the MACs of the pruned layers that are left, in place of the metric.
    """
    rows = _select_rows(rows, dict(filters or {}))
    fields = ("model", "data", "block", *budget_names(), "protocol", "metric")
    varying = [name for name in fields if len({json.dumps(row.get(name)) for row in rows}) > 1]
    columns = list(dict.fromkeys(tuple(row.get(name) for name in varying) for row in rows))
    if varying == [SPARSITY]:
        columns.sort(key=lambda column: (column[0] is None, isinstance(column[0], str), column[0] or 0))  # numbers, texts, none
    counts = {row["n"] for row in rows}
    dense = _dense_cells(rows)
    header = ["method", *(["dense"] if dense else []), *(_column_title(varying, column) for column in columns)]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for method in dict.fromkeys(str(row["method"]) for row in rows):
        line = [method, *([dense[method]] if dense else [])]
        for column in columns:
            matches = [r for r in rows if r["method"] == method and tuple(r.get(name) for name in varying) == column]
            if len(matches) > 1:
                raise SmartpruneError(f"{method}: {len(matches)} rows belong to one cell of the table; select rows with key=glob")
            line.append(_cell(matches[0], len(counts) > 1) if matches else "-")
        lines.append(line)
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines], _caption(rows, counts)


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of 400 digits
        return False


def _select_rows(rows: Sequence[Row], filters: dict[str, str]) -> list[Row]:
    shown = filters.pop("show", None)
    if shown not in (None, *OTHER_METRICS):
        raise SmartpruneError(f"show={shown}: only these can replace the metric: {', '.join(OTHER_METRICS)}")
    rows = [row for row in rows if all(fnmatchcase(str(row.get(k)), glob) for k, glob in filters.items())]
    if shown:
        rows = [_with_metric(row, shown) for row in rows if isinstance(row.get(shown), list) and row[shown]]
    if not rows:
        conditions = " ".join(f"{key}={glob}" for key, glob in (filters | ({shown: "*"} if shown else {})).items())
        raise SmartpruneError(f"no row has {conditions}")
    return rows


def _with_metric(row: Row, name: str) -> Row:
    """The row with another number of its runs in place of the metric."""
    if not all(map(is_number, row[name])):
        raise SmartpruneError(f"{row['method']}: {name} is {row[name]!r}; it must be a list of numbers")
    others = {key: value for key, value in row.items() if key not in ("dense", "difference")}
    return {**others, "metric": OTHER_METRICS[name], "unit": "share", **summary(row[name])}


def _dense_cells(rows: Sequence[Row]) -> dict[str, str]:
    """The metric of the dense model of each method, or its range where one dense model was evaluated several times.

    Empty unless all rows have a dense metric, and where the rows belong to several dense models.
    """
    means: dict[str, dict[str, float]] = {}
    for row in rows:
        if not isinstance(row.get("dense"), dict):
            return {}
        means.setdefault(str(row["method"]), {})[_cell({**row["dense"], "unit": row.get("unit")}, False)] = row["dense"]["mean"]
    one_model = all(len({json.dumps(row.get(name)) for row in rows}) == 1 for name in ("model", "data", "protocol", "metric"))
    if not one_model and any(len(cells) > 1 for cells in means.values()):
        return {}
    ordered = {method: sorted(cells, key=lambda cell: cells[cell]) for method, cells in means.items()}
    return {method: _range(cells[0], cells[-1]) for method, cells in ordered.items()}


def _range(least: str, most: str) -> str:
    """
    >>> _range("95.05", "95.05 ± 0.00"), _range("94.98", "95.05"), _range("95.05 ± 0.10", "95.05 ± 0.10")
    ('95.05', '94.98 to 95.05', '95.05 ± 0.10')
    """
    if least == most:
        return least
    means = dict.fromkeys(cell.partition(" ")[0] for cell in (least, most))
    return f"{least} to {most}" if len(means) > 1 else next(iter(means))


def _column_title(names: Sequence[str], values: Sequence[Any]) -> str:
    parts = [
        f"{name} {format_setting(value)}" if isinstance(value, (int, float)) else str(value)
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    return ", ".join(parts) or "value"


def _cell(row: Row, with_n: bool) -> str:
    percent = row.get("unit") == "share"

    def show(value: float) -> str:
        return f"{100 * value:.2f}" if percent else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"

    cell = show(row["mean"])
    if row["std"] is not None:
        cell += f" ± {show(row['std'])}"
    elif is_number(row.get("low")) and is_number(row.get("high")):
        cell += f" [{show(row['low'])}, {show(row['high'])}]"
    if percent and is_number(row.get("difference")):
        cell += f" ({100 * row['difference']:+.2f})"
    return cell + (f", n={row['n']}" if with_n else "")


def _caption(rows: Sequence[Row], counts: set[Any]) -> str:
    parts = []
    for name in ("data", "model", "block", *budget_names(), "protocol"):
        values = {json.dumps(row.get(name)): row.get(name) for row in rows}
        value = next(iter(values.values()))
        if len(values) == 1 and value not in (None, "", "-"):
            titles = {"block": f"blocks of {value}", **{kind: f"{kind} {value}" for kind in budget_names()}}
            parts.append(titles.get(name, str(value)))
    shares = {str(row["metric"]) for row in rows if row.get("unit") == "share"}
    names = list(dict.fromkeys(str(row["metric"]) for row in rows))
    mixed = 0 < len(shares) < len(names)
    metrics = ", ".join(f"{name} in %" if mixed and name in shares else name for name in names)
    if baselines := list(dict.fromkeys(str(row["to"]) for row in rows if "to" in row)):
        metrics += f", against {' or '.join(baselines)}"
    if shares and not mixed:
        metrics += " in %" + (" (difference to dense)" if any("difference" in row for row in rows) else "")
    if any(row["std"] is not None for row in rows):
        metrics += ", mean ± standard deviation"
    if any("low" in row for row in rows):
        metrics += ", median [quartiles]"
    if len(counts) == 1 and counts != {1}:
        metrics += f", n = {next(iter(counts))}"
    return "; ".join([*parts, metrics]) + "."
