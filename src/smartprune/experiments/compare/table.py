"""A comparison as tables for the terminal, and as CSV with a line per run."""

from __future__ import annotations

import csv
import io
import json
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import text
from ...budgets import SPARSITY, budget_unit
from ...training.config import OWN_SETTINGS
from .identity import protocol
from .labels import format_setting

if TYPE_CHECKING:
    from .comparison import Comparison, Row

WIDTH = 100
METRIC_COLUMNS = 3  # most budgets in one table of metrics, where each has three columns
MACS_COLUMNS = 5  # most budgets in one table of MACs, where each has one column


def comparison_text(comparison: Comparison, ascii_only: bool) -> str:
    """A table per group: the dense metric, and for every budget the metric, the difference to dense, and n."""
    lines: list[str] = []
    titles = comparison.titles()
    for group, rows in comparison.groups().items():
        *_, protocol_line, metric = group
        title = f"{titles[group]}: {metric} in %, test split, after the last epoch, by requested budget"
        lines += ["", *textwrap.wrap(title, WIDTH), *textwrap.wrap(protocol_line, WIDTH)]
        shares = sorted({row.share for row in rows}, key=lambda share: (share[0] != SPARSITY, share))
        for first in range(0, len(shares), METRIC_COLUMNS):
            lines += ["", *_metric_table(rows, shares[first : first + METRIC_COLUMNS], ascii_only)]
        lines += _macs_tables(rows, shares, ascii_only)
    if comparison.left_out:
        lines += ["", "left out"]
        lines += [f"  {folder}: {reason}" for folder, reason in comparison.left_out]
    return "\n".join(map(text.escape, lines[1:]))  # settings of a foreign run may hold any characters


def _metric_table(rows: Sequence[Row], shares: Sequence[tuple[str, float]], ascii_only: bool) -> list[str]:
    header = ["method", "dense"]
    for share in shares:
        header += [_share_title(share), "diff", "n"]
    lines: list[list[str]] = []
    for method in dict.fromkeys(row.method for row in rows):
        row_at = {row.share: row for row in rows if row.method == method}
        shown = [row_at[share] for share in shares if share in row_at]
        if not shown:
            continue
        dense = {run.config["seed"]: run.dense for row in shown for run in row.runs}
        line = [method, mean_and_std(list(dense.values()), ascii_only)]
        for share in shares:
            if share in row_at:
                row = row_at[share]
                line += [mean_and_std(row.values, ascii_only), f"{100 * row.difference:+.2f}", str(len(row.runs))]
            else:
                line += ["-", "", ""]
        lines.append(line)
    return text.table(header, lines, "<>" + ">>>" * len(shares), WIDTH)


def _macs_tables(rows: Sequence[Row], shares: Sequence[tuple[str, float]], ascii_only: bool) -> list[str]:
    """The MACs of the pruned layers that are left. The same number of blocks can leave more MACs in one method than in another."""
    shares = [share for share in shares if budget_unit(share[0]) != "MACs"]
    macs_left = {(row.method, row.share): row.macs_left for row in rows if row.macs_left}
    tables: list[str] = []
    for first in range(0, len(shares), MACS_COLUMNS):
        columns = shares[first : first + MACS_COLUMNS]
        methods = [m for m in dict.fromkeys(row.method for row in rows) if any((m, share) in macs_left for share in columns)]
        lines = [
            [m, *(mean_and_std(macs_left[m, s], ascii_only) if (m, s) in macs_left else "-" for s in columns)] for m in methods
        ]
        if lines:
            header = ["method", *map(_share_title, columns)]
            table = text.table(header, lines, "<" + ">" * len(columns), WIDTH)
            tables += ["", "MACs of the pruned layers left, in %", *table]
    return tables


def _share_title(share: tuple[str, float]) -> str:
    kind, number = share
    return f"{kind} {format_setting(number)}"


def mean_and_std(values: Sequence[float], ascii_only: bool = False) -> str:
    """Mean and standard deviation in percent.

    >>> mean_and_std([0.91, 0.93]), mean_and_std([0.5])
    ('92.00 ± 1.41', '50.00')
    """
    mean = f"{100 * statistics.fmean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} {'+-' if ascii_only else '±'} {100 * statistics.stdev(values):.2f}"


def comparison_csv(comparison: Comparison) -> str:
    """One line per run. ``blocks_removed`` and ``macs_left`` are shares of the blocks and the MACs of the pruned layers."""
    lines = []
    budgets = [*OWN_SETTINGS, *(run.share[0] for run in comparison.runs)]
    for run in comparison.runs:
        config = run.config
        lines.append(
            {
                "folder": str(run.folder),
                "data": run.data,
                "model": config["model"],
                "block": config["block"],
                "method": config["method"],
                "settings": json.dumps(config["settings"]),
                **dict.fromkeys(budgets),
                run.share[0]: run.share[1],
                "seed": config["seed"],
                "metric": run.metric,
                "pruned": run.pruned,
                "dense": run.dense,
                "difference": run.pruned - run.dense,
                "blocks_removed": run.blocks_removed,
                "macs_left": run.macs_left,
                "seconds": run.seconds,
                "device": run.versions.get("device", ""),
                "torch": run.versions.get("torch", ""),
                "protocol": protocol(config),
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: text.csv_cell(value) for name, value in line.items()} for line in lines)
    return out.getvalue()
