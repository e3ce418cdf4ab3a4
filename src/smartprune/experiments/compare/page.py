"""A comparison as an HTML page: the metric over sparsity, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...budgets import budget_label
from ...reports.shell import header, html_name, html_page, html_text, origin_line, tiles
from .chart import Chart, svg
from .comparison import Comparison, Row
from .labels import format_setting
from .runs import FinishedRun, Group
from .table import mean_and_std

COLUMNS = {  # title -> class, which says on which screens the column is shown
    "Method and budget": "", "{metric}, %": "num", "n": "num", "Difference, points": "num", "Dense, %": "num wide",
    "MACs of the pruned layers left, %": "num wide", "Sparsity (blocks of the pruned layers), %": "num mid",
}  # fmt: skip
ENOUGH = 3  # runs with the same settings, to call a result the best
MINUS = "\u2212"


def comparison_page(comparison: Comparison, charts: Sequence[Chart], command: str = "") -> str:
    """One self-contained HTML document. ``charts`` are its panels, in the order of the groups; ``command`` made the page."""
    runs = comparison.runs
    methods = {run.method for run in runs}
    summary = tiles(
        [
            (
                "Runs",
                f"{len(runs)}",
                f"{_number(len(methods), 'method')}, {_number(len(comparison.groups()), 'group')} of comparable runs",
            ),
            _best(comparison.rows),
        ]
    )
    figures = "".join(
        f'<figure class="sheet" role="img" aria-label="{html_text(_describe(chart))}">{svg([chart])}</figure>' for chart in charts
    )
    titles = comparison.titles()
    sections = "".join(_section(titles[group], group, rows) for group, rows in comparison.groups().items())
    left_out = "".join(f"<li>{html_name(folder)}: {html_text(reason)}</li>" for folder, reason in comparison.left_out)
    if left_out:
        left_out = f"<h2>Left out</h2><ul>{left_out}</ul>"
    body = (
        f'{header("smartprune compare")}<main id="main"><h1>Comparison of {_number(len(runs), "finished run")}</h1>'
        f"{origin_line(_origin(runs), command)}{summary}"
        f"<h2>Metric and cost</h2><p class='note'>Error bars show one standard deviation of runs that differ only in their seed. "
        f"Points without a bar are single runs.</p><div class='sheets'>{figures}</div>{sections}{left_out}</main>"
    )
    return html_page("Comparison of runs", body, {"layers": [], "charts": [], "first": 0})


def _origin(runs: Sequence[FinishedRun]) -> list[str]:
    """When the runs finished, and with which versions."""
    dates = sorted(run.finished for run in runs if run.finished)
    parts = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    used = {name: {run.versions.get(name, "") for run in runs} - {""} for name in ("smartprune", "torch", "python")}
    return parts + [f"{name} {', '.join(sorted(versions))}" for name, versions in used.items() if versions]


def _describe(chart: Chart) -> str:
    return f"{chart.title}: {chart.y} over {chart.x}, for {', '.join(series.name for series in chart.series)}"


def _best(rows: Sequence[Row]) -> tuple[str, str, str]:
    """The tile with the best change by pruning, among the rows with enough runs."""
    repeated = [row for row in rows if len(row.runs) >= ENOUGH]
    if not repeated:
        most = max(len(row.runs) for row in rows)
        return "Runs per row", f"at most {most}", f"too few to call one the best; compare {ENOUGH} seeds or more"
    best = max(repeated, key=lambda row: row.difference)
    spread = f"± {100 * statistics.stdev(best.values):.2f}, n = {len(best.runs)}"
    value = f"{100 * best.difference:+.2f} points".replace("-", MINUS)
    return "Best change by pruning", value, f"{spread}; {best.method} at {_removed(best)}, {best.runs[0].config['model']}"


def _section(title: str, group: Group, rows: Sequence[Row]) -> str:
    *_, protocol, metric = group
    headings = [heading.format(metric=metric[0].upper() + metric[1:]) for heading in COLUMNS]
    titles = "".join(
        f'<th scope="col" class="{style}">{html_text(heading)}</th>'
        for heading, style in zip(headings, COLUMNS.values(), strict=True)
    )
    lines = []
    for row in rows:
        cells = [
            mean_and_std(row.values),
            f"{len(row.values)}",
            f"{100 * row.difference:+.2f}".replace("-", MINUS),
            f"{100 * statistics.fmean(row.dense):.2f}",
            f"{100 * statistics.fmean(row.macs_left):.2f}" if row.macs_left else "",
            f"{100 * statistics.fmean(row.blocks_removed):.2f}" if row.blocks_removed else "",
        ]
        styles = list(COLUMNS.values())[1:]
        tags = "".join(f'<td class="{style}">{html_text(cell)}</td>' for style, cell in zip(styles, cells, strict=True))
        budget = f'<div class="small">{html_text(_removed(row))}</div>'
        lines.append(f'<tr><th scope="row">{html_name(row.method)}{budget}</th>{tags}</tr>')
    return (
        f"<h2>{html_text(f'{title}: {metric}')}</h2><p class='note'>{html_text(protocol)}</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html_text(f"Runs of {title}")}"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _number(count: int, noun: str) -> str:
    """A count with its noun, in the plural if needed."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _removed(row: Row) -> str:
    kind, share = row.share
    return f"{format_setting(round(100 * share, 10))} % of {budget_label(kind)}"
