"""The panels of a comparison: the metric over the share removed, one line per method."""

from __future__ import annotations

import statistics

from ...budgets import SPARSITY, budget_label, budget_names
from .chart import Chart, Point, Series
from .comparison import Comparison


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """A panel per group and kind of budget: the metric in percent over the share removed."""
    charts = []
    for (data, model, block, _, metric), rows in comparison.groups().items():
        for kind in dict.fromkeys([*budget_names(), *(row.share[0] for row in rows)]):
            panel = [row for row in rows if row.share[0] == kind]
            if not panel:
                continue
            series: dict[str, list[Point]] = {}
            for row in panel:
                std = 100 * statistics.stdev(row.values) if len(row.values) > 1 else None
                point = Point(row.share[1], 100 * statistics.fmean(row.values), std)
                series.setdefault(row.method, []).append(point)
            lines = tuple(Series(name, tuple(points)) for name, points in series.items())
            dense = {run.config["seed"]: run.dense for row in panel for run in row.runs}
            level = ("dense", 100 * statistics.fmean(dense.values()))
            share_of = f"share of {budget_label(kind)} removed"
            x = f"sparsity ({share_of})" if kind == SPARSITY else share_of
            charts.append(Chart(f"{data}, {model}, blocks of {block}", x, f"{metric}, %", lines, level))
    return charts
