"""The panels of a comparison: the metric over the MACs that are left, and over the share removed, one line per method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...budgets import SPARSITY, budget_label, budget_names
from .chart import Chart, Point, Series
from .comparison import Comparison, Row
from .runs import Group


def comparison_charts(comparison: Comparison) -> list[Chart]:
    """The panels of every group. The error bars show one standard deviation of the runs with the same settings.

    The first panel shows the metric in percent over the MACs that are left, because the same number of blocks can leave different
    MACs. A panel per kind of budget shows it over the share removed, if several shares were compared or the MACs are not known.
    """
    charts = []
    titles = comparison.titles()
    for group, rows in comparison.groups().items():
        known = all(row.macs_left for row in rows)
        if known:
            title = f"{titles[group]}: {group[-1]} by MACs left"
            charts.append(_chart(title, "MACs of the pruned layers left, %", group, rows, _macs_left, True))
        for kind in dict.fromkeys([*budget_names(), *(row.share[0] for row in rows)]):
            panel = [row for row in rows if row.share[0] == kind]
            if not panel or (known and len({row.share for row in panel}) == 1):
                continue
            share_of = f"share of {budget_label(kind)} removed"
            x = f"sparsity ({share_of})" if kind == SPARSITY else share_of
            title = f"{titles[group]}: {group[-1]} by {SPARSITY if kind == SPARSITY else share_of}"
            charts.append(_chart(title, x, group, panel, lambda row: row.share[1]))
    return charts


def _chart(
    title: str, x: str, group: Group, rows: Sequence[Row], place: Callable[[Row], float], is_measured: bool = False
) -> Chart:
    series: dict[str, list[Point]] = {}
    for row in rows:
        std = 100 * statistics.stdev(row.values) if len(row.values) > 1 else None
        series.setdefault(row.method, []).append(Point(place(row), 100 * statistics.fmean(row.values), std))
    lines = tuple(Series(name, tuple(sorted(points, key=lambda point: point.x))) for name, points in series.items())
    dense = {run.config["seed"]: run.dense for row in rows for run in row.runs}
    level = ("dense", 100 * statistics.fmean(dense.values()))
    return Chart(title, x, f"{group[-1]}, %", lines, level, is_measured)


def _macs_left(row: Row) -> float:
    return 100 * statistics.fmean(row.macs_left)
