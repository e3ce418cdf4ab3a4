"""Tables of words instead of numbers."""

from __future__ import annotations

from typing import Any

from smartprune.experiments.compare.markdown import table_lines


def row(model: str, method: str, outcome: str, value: float = 1.0, reason: str | None = None) -> dict[str, Any]:
    return {"model": model, "method": method, "outcome": outcome, "mean": value, "reason": reason}


def test_outcomes_are_a_line_per_model_with_numbered_reasons() -> None:
    rows = [
        row("a", "plan", "3 of 4"),
        row("a", "pack", "pass"),
        row("b", "plan", "fails", 0.0, "too | small"),
        row("b", "pack", "-", 0.0),
        row("c", "plan", "fails", 0.0, "too | small"),
        row("d", "plan", "1 of 1"),
        row("d", "pack", "fails", 0.0, "no room"),
    ]
    assert table_lines(rows, {}, "there") == [
        "| model | plan | pack |",
        "| --- | --- | --- |",
        "| a | 3 of 4 | pass |",
        "| b | fails (1) | - |",
        "| c | fails (1) | - |",
        "| d | 1 of 1 | fails (2) |",
        "",
        "1. too | small",
        "2. no room",
        "",
        "1 of 4 models pass every stage. [there](there)",
    ]


def test_without_a_failure_there_are_no_reasons() -> None:
    lines = table_lines([row("a", "plan", "pass")], {}, "")
    assert lines == ["| model | plan |", "| --- | --- |", "| a | pass |", "", "1 of 1 models pass every stage."]
