"""Runs side by side as a page: the metric over sparsity, and the table behind it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ...reports.shell import header, name, page, tiles, words
from . import Comparison, Row
from .chart import Chart, svg
from .names import plain

UNITS = {"macs": "MACs", "cycles": "NPU cycles"}
HEAD = ("Method", "Removed", "Metric, %", "Deviation", "n", "Dense, %", "Difference, points", "MACs left, %")


def comparison_page(found: Comparison, charts: Sequence[Chart]) -> str:
    """One self-contained HTML document; ``charts`` are its panels, in the order of the groups."""
    entries = found.entries
    methods = {entry.method for entry in entries}
    best = max(found.rows, key=lambda row: row.difference)
    shown = tiles(
        [
            ("Runs", f"{len(entries)}", f"methods: {len(methods)}, groups that can be compared: {len(found.groups())}"),
            (
                "Best change by pruning",
                f"{100 * best.difference:+.2f} points".replace("-", "\u2212"),
                f"{best.entries[0].method} at {_removed(best)}, {best.entries[0].config['model']}, n = {len(best.entries)}",
            ),
        ]
    )
    drawn = "".join(
        f'<figure class="sheet" role="img" aria-label="{words(_said(chart))}">{svg([chart])}</figure>' for chart in charts
    )
    sections = "".join(_section(group, rows) for group, rows in found.groups().items())
    left_out = "".join(f"<li>{name(folder)}: {words(reason)}</li>" for folder, reason in found.left_out)
    if left_out:
        left_out = f"<h2>Left out</h2><ul>{left_out}</ul>"
    body = (
        f'{header("smartprune compare")}<main id="main"><h1>{len(entries)} finished runs side by side</h1>{shown}'
        f"<h2>Metric over sparsity</h2>{drawn}{sections}{left_out}</main>"
    )
    return page("Runs compared", body, {"layers": [], "charts": [], "first": 0})


def _said(chart: Chart) -> str:
    return f"{chart.title}: {chart.y} over {chart.x}, for {', '.join(series.name for series in chart.series)}"


def _section(group: tuple[str, str, str, str, str], rows: Sequence[Row]) -> str:
    data, model, block, protocol, metric = group
    titles = "".join(f'<th scope="col" class="{"num" if i else ""}">{words(title)}</th>' for i, title in enumerate(HEAD))
    lines = []
    for row in rows:
        spread = f"{100 * statistics.stdev(row.values):.2f}" if len(row.values) > 1 else ""
        cells = [
            _removed(row),
            f"{100 * statistics.fmean(row.values):.2f}",
            spread,
            f"{len(row.values)}",
            f"{100 * statistics.fmean(row.dense):.2f}",
            f"{100 * row.difference:+.2f}".replace("-", "\u2212"),
            f"{100 * statistics.fmean(row.macs_left):.2f}" if row.macs_left else "",
        ]
        tags = "".join(f'<td class="num">{words(cell)}</td>' for cell in cells)
        lines.append(f'<tr><th scope="row">{name(row.entries[0].method)}</th>{tags}</tr>')
    return (
        f"<h2>{words(f'{data}, {model}, blocks of {block}: {metric}')}</h2><p class='note'>{words(protocol)}</p>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{words(f"Runs of {model} on {data}")}"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _removed(row: Row) -> str:
    kind, share = row.entries[0].share
    return f"{plain(round(100 * share, 10))} % of {UNITS.get(kind, 'blocks')}"
