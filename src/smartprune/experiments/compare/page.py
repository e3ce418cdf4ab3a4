"""A comparison as an HTML page: the metric over sparsity, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...budgets import budget_label
from ...reports.shell import header, html_name, html_page, html_text, tiles
from .chart import Chart, svg
from .comparison import Comparison, Row
from .labels import format_setting
from .runs import Group

HEADINGS = (
    "Method", "Requested to remove", "Sparsity (blocks of the pruned layers), %", "Metric, %", "Deviation", "n", "Dense, %",
    "Difference, points", "MACs of the pruned layers left, %",
)  # fmt: skip
MINUS = "\u2212"


def comparison_page(comparison: Comparison, charts: Sequence[Chart]) -> str:
    """One self-contained HTML document. ``charts`` are its panels, in the order of the groups."""
    runs = comparison.runs
    methods = {run.method for run in runs}
    best = max(comparison.rows, key=lambda row: row.difference)
    summary = tiles(
        [
            (
                "Runs",
                f"{len(runs)}",
                f"{_number(len(methods), 'method')}, {_number(len(comparison.groups()), 'group')} of comparable runs",
            ),
            (
                "Best change by pruning",
                f"{100 * best.difference:+.2f} points".replace("-", MINUS),
                f"{best.method} at {_removed(best)}, {best.runs[0].config['model']}, n = {len(best.runs)}",
            ),
        ]
    )
    figures = "".join(
        f'<figure class="sheet" role="img" aria-label="{html_text(_describe(chart))}">{svg([chart])}</figure>' for chart in charts
    )
    sections = "".join(_section(group, rows) for group, rows in comparison.groups().items())
    left_out = "".join(f"<li>{html_name(folder)}: {html_text(reason)}</li>" for folder, reason in comparison.left_out)
    if left_out:
        left_out = f"<h2>Left out</h2><ul>{left_out}</ul>"
    body = (
        f'{header("smartprune compare")}<main id="main"><h1>Comparison of {_number(len(runs), "finished run")}</h1>{summary}'
        f"<h2>Metric over the requested share</h2>{figures}{sections}{left_out}</main>"
    )
    return html_page("Comparison of runs", body, {"layers": [], "charts": [], "first": 0})


def _describe(chart: Chart) -> str:
    return f"{chart.title}: {chart.y} over {chart.x}, for {', '.join(series.name for series in chart.series)}"


def _section(group: Group, rows: Sequence[Row]) -> str:
    data, model, block, protocol, metric = group
    titles = "".join(f'<th scope="col" class="{"num" if i else ""}">{html_text(title)}</th>' for i, title in enumerate(HEADINGS))
    lines = []
    for row in rows:
        cells = [
            _removed(row),
            f"{100 * statistics.fmean(row.blocks_removed):.2f}" if row.blocks_removed else "",
            f"{100 * statistics.fmean(row.values):.2f}",
            f"{100 * statistics.stdev(row.values):.2f}" if len(row.values) > 1 else "",
            f"{len(row.values)}",
            f"{100 * statistics.fmean(row.dense):.2f}",
            f"{100 * row.difference:+.2f}".replace("-", MINUS),
            f"{100 * statistics.fmean(row.macs_left):.2f}" if row.macs_left else "",
        ]
        tags = "".join(f'<td class="num">{html_text(cell)}</td>' for cell in cells)
        lines.append(f'<tr><th scope="row">{html_name(row.method)}</th>{tags}</tr>')
    return (
        f"<h2>{html_text(f'{data}, {model}, blocks of {block}: {metric}')}</h2><p class='note'>{html_text(protocol)}</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_text(f"Runs of {model} on {data}")}"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _number(count: int, noun: str) -> str:
    """A count with its noun, in the plural if needed."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _removed(row: Row) -> str:
    kind, share = row.share
    return f"{format_setting(round(100 * share, 10))} % of {budget_label(kind)}"
