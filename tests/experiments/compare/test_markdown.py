"""Rows of records as Markdown tables."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.record_rows import row
from smartprune import SmartpruneError
from smartprune.experiments.compare.markdown import markdown


def test_dense_metrics_of_one_model_are_shown_as_a_range() -> None:
    def evaluated(sparsity: float, dense: float, **changes: Any) -> dict[str, Any]:
        summary = {"values": [dense], "mean": dense, "std": None, "n": 1}
        return row(sparsity=sparsity, unit="share", dense=summary, **changes)

    lines, _ = markdown([evaluated(0.7, 0.5804), evaluated(0.5, 0.5797), evaluated(0.6, 0.58)])
    assert lines[0] == "| method | dense | sparsity 0.5 | sparsity 0.6 | sparsity 0.7 |"
    assert "| 57.97 to 58.04 |" in lines[2]
    assert markdown([evaluated(0.5, 0.58), evaluated(0.7, 0.58)])[0][2].split(" | ")[1] == "58.00"
    two = [evaluated(0.5, 0.58, model="a"), evaluated(0.5, 0.9, model="b")]
    assert "dense" not in markdown(two)[0][0]


def test_markdown_has_a_column_per_value_that_differs() -> None:
    rows = [row(), row(sparsity=0.9), row(method="other|one", model="m")]
    lines, common = markdown(rows)
    assert lines[0] == "| method | sparsity 0.5 | sparsity 0.9 |"
    assert lines[2:] == ["| smart | 2 ± 1 | 2 ± 1 |", "| other\\|one | 2 ± 1 | - |"]
    assert common == "d; m; blocks of 4x2; p; accuracy, mean ± standard deviation, n = 3."
    assert markdown(rows, {"sparsity": "0.9"})[0][0] == "| method | value |"
    assert markdown(rows, {"sparsity": "0.9"})[1].startswith("d; m; blocks of 4x2; sparsity 0.9; p;")
    assert markdown([row(sparsity=None, macs=0.9)])[1].startswith("d; m; blocks of 4x2; macs 0.9; p;")
    with pytest.raises(SmartpruneError, match=r"no row has sparsity=0\.7"):
        markdown(rows, {"sparsity": "0.7"})
    with pytest.raises(SmartpruneError, match="2 rows belong to one cell"):
        markdown([row(), row()])
