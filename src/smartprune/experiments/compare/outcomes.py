"""Rows whose result is a word, such as ``pass``, as a Markdown table: a line per model and a column per method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def outcome_lines(rows: Sequence[Row], link: str) -> list[str]:
    """The table, the numbered reasons of its cells, and a line that counts the models without a failure.

    A row has an ``outcome``, the text of its cell, and a ``reason`` if something failed. Its value is 1 if nothing did.
    """
    columns = list(dict.fromkeys(str(row["method"]) for row in rows))
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    cells = {(str(row["model"]), str(row["method"])): row for row in rows}
    reasons = list(dict.fromkeys(str(row["reason"]) for row in rows if row.get("reason")))
    lines = ["| " + " | ".join(["model", *columns]) + " |", "|" + " --- |" * (len(columns) + 1)]
    for model in models:
        line = [model, *(_cell(cells.get((model, column)), reasons) for column in columns)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    passed = sum(all(row["mean"] == 1 for row in rows if str(row["model"]) == model) for model in models)
    summary = f"{passed} of {len(models)} models pass every stage."
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return [*lines, "", *([*notes, ""] if notes else []), summary + (f" [{link}]({link})" if link else "")]


def _cell(row: Row | None, reasons: Sequence[str]) -> str:
    if row is None:
        return "-"
    reason = row.get("reason")
    return f"{row['outcome']} ({reasons.index(str(reason)) + 1})" if reason else str(row["outcome"])
