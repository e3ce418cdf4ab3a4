"""Line charts with error bars: as SVG with nothing but text, as PNG where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...errors import SmartpruneError
from ...files import write_atomic
from ...reports.draw import ticks
from ...text import shorten

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#b8860b", "#56b4e9", "#555555")
HEIGHT, PLOT = 430, 520  # of a panel, with its axes; across the plot alone
LEFT, TOP, BOTTOM = 70, 50, 60
LEGEND, LETTER, LONGEST = 60, 7.5, 48  # its margin, a letter's width, letters of a name
DODGE = 4.0  # pixels between series at the same place


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """One panel. ``level`` is a dashed line with a name, such as the dense model's accuracy."""

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    level: tuple[str, float] | None = None


def save_charts(charts: Sequence[Chart], path: str | Path) -> None:
    """Writes the panels one below the other; the ending of the name says the format."""
    ending = Path(path).suffix.lower()
    if ending == ".svg":
        write_atomic(path, svg(charts).encode())
    elif ending == ".png":
        _save_png(charts, Path(path))
    else:
        raise SmartpruneError(f"{path}: a plot is written as .svg, or as .png with matplotlib; name it so")


def svg(charts: Sequence[Chart]) -> str:
    """The panels as one SVG text."""
    if not charts:
        raise SmartpruneError("there is nothing to draw: no run has a budget in blocks, MACs or cycles")
    longest = min(LONGEST, max(len(series.name) for chart in charts for series in chart.series))
    width, height = round(LEFT + PLOT + LEGEND + LETTER * max(longest, 8)), HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate(0 {number * HEIGHT})">', *_panel(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(chart: Chart) -> list[str]:
    xs = sorted({point.x for series in chart.series for point in series.points})
    reach = [(p.y - (p.error or 0), p.y + (p.error or 0)) for series in chart.series for p in series.points]
    if chart.level is not None:
        reach.append((chart.level[1], chart.level[1]))
    marks = ticks(min(low for low, _ in reach), max(high for _, high in reach))
    margin = 0.08 * (xs[-1] - xs[0]) or 0.05
    right, bottom = LEFT + PLOT, HEIGHT - BOTTOM

    def across(x: float) -> float:
        return LEFT + (x - xs[0] + margin) / (xs[-1] - xs[0] + 2 * margin) * (right - LEFT)

    def down(y: float) -> float:
        return bottom - (y - marks[0]) / (marks[-1] - marks[0]) * (bottom - TOP)

    out = [_text(LEFT, 26, chart.title, 'font-size="15" font-weight="bold"')]
    for mark in marks:
        out.append(_line(LEFT, down(mark), right, down(mark), 'stroke="#e4e4e4"'))
        out.append(_text(LEFT - 8, down(mark) + 4, f"{mark:g}", 'text-anchor="end"'))
    for x in xs:
        out.append(_line(across(x), bottom, across(x), bottom + 5, 'stroke="#888"'))
        out.append(_text(across(x), bottom + 20, f"{x:g}", 'text-anchor="middle"'))
    out.append(_line(LEFT, bottom, right, bottom, 'stroke="#888"'))
    out.append(_line(LEFT, TOP, LEFT, bottom, 'stroke="#888"'))
    out.append(_text((LEFT + right) / 2, HEIGHT - 18, chart.x, 'text-anchor="middle"'))
    middle = (TOP + bottom) / 2
    out.append(_text(18, middle, chart.y, f'text-anchor="middle" transform="rotate(-90 18 {middle:.1f})"'))
    row = TOP + 6.0
    if chart.level is not None:
        name, value = chart.level
        out.append(_line(LEFT, down(value), right, down(value), 'stroke="#444" stroke-dasharray="6 4"'))
        out.append(_line(right + 14, row, right + 36, row, 'stroke="#444" stroke-dasharray="6 4"'))
        out.append(_text(right + 42, row + 4, name))
        row += 20
    for number, series in enumerate(chart.series):
        colour = COLOURS[number % len(COLOURS)]
        shift = DODGE * (number - (len(chart.series) - 1) / 2)
        places = [(across(point.x) + shift, down(point.y), point) for point in series.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        out.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, point in places:
            if point.error:
                for end in (-point.error, point.error):
                    out.append(_line(x, y, x, down(point.y + end), f'stroke="{colour}" stroke-width="1.5"'))
                    edge = down(point.y + end)
                    out.append(_line(x - 4, edge, x + 4, edge, f'stroke="{colour}" stroke-width="1.5"'))
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        out.append(_line(right + 14, row, right + 36, row, f'stroke="{colour}" stroke-width="2"'))
        out.append(f'<circle cx="{right + 25}" cy="{row:.1f}" r="4" fill="{colour}"/>')
        out.append(_text(right + 42, row + 4, shorten(series.name, LONGEST)))
        row += 20
    return out


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'.replace(" >", ">")


def _save_png(charts: Sequence[Chart], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise SmartpruneError(
            f"{path}: a .png needs matplotlib, which is not installed; run: pip install matplotlib, or write an .svg"
        ) from None
    figure = Figure(figsize=(7.6, HEIGHT * len(charts) / 100), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, chart in zip(figure.subplots(len(charts), 1, squeeze=False)[:, 0], charts, strict=True):
        axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
        axes.grid(axis="y", color="#e4e4e4")
        if chart.level is not None:
            axes.axhline(chart.level[1], color="#444", linestyle="--", label=chart.level[0])
        for number, series in enumerate(chart.series):
            axes.errorbar(
                [point.x for point in series.points],
                [point.y for point in series.points],
                [point.error or 0 for point in series.points],
                color=COLOURS[number % len(COLOURS)],
                marker="o",
                capsize=3,
                label=series.name,
            )
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
