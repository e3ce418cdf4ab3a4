"""Line charts with error bars, written as SVG, or as PNG where matplotlib is installed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...errors import SmartpruneError
from ...files import write_atomic
from ...reports.draw import ticks
from ...text import escape as printable
from ...text import shorten

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5195", "#b8860b", "#56b4e9", "#555555")
HEIGHT, PLOT_WIDTH = 380, 360  # of a panel with its axes, without the legend below; of the plot alone
LEFT, TOP, BOTTOM = 70, 74, 60
RIGHT, BASE = LEFT + PLOT_WIDTH, HEIGHT - BOTTOM
WIDTH = RIGHT + 20
LEGEND_LINE, LETTER_WIDTH, MAX_NAME = 22, 8.6, 42  # the width of a bold letter
TITLE_LINES = 3
MAX_MARKS = 6  # on the axis of x; more different values get round numbers
SHIFT = 4.0  # pixels between series, so that points at the same place stay visible


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    error: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the error bar. That of a share in percent stays between 0 and 100."""
        error = self.error or 0.0
        return max(self.y - error, min(self.y, 0.0)), min(self.y + error, max(self.y, 100.0))


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """One panel. ``level`` is a dashed line with a name, such as the accuracy of the dense model.

    ``is_measured``: the values of x are measured, not chosen, so the axis has round numbers.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    level: tuple[str, float] | None = None
    is_measured: bool = False


def save_charts(charts: Sequence[Chart], path: str | Path) -> None:
    """Writes the panels, one below the other, as .svg or .png."""
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        write_atomic(path, svg(charts).encode())
    elif suffix == ".png":
        _save_png(charts, Path(path))
    else:
        raise SmartpruneError(f"{path}: a plot is written as .svg, or as .png with matplotlib; use one of these endings")


def svg(charts: Sequence[Chart]) -> str:
    """The panels as one SVG document."""
    if not charts:
        raise SmartpruneError("nothing to draw: no run has a budget")
    heights = [HEIGHT + LEGEND_LINE * (len(chart.series) + (chart.level is not None)) for chart in charts]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{sum(heights)}" viewBox="0 0 {WIDTH} {sum(heights)}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" fill="#222">',
        f'<rect width="{WIDTH}" height="{sum(heights)}" fill="#ffffff"/>',
    ]
    for number, chart in enumerate(charts):
        parts += [f'<g transform="translate(0 {sum(heights[:number])})">', *_panel(chart), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(chart: Chart) -> list[str]:
    xs = sorted({point.x for series in chart.series for point in series.points})
    ranges = [point.ends for series in chart.series for point in series.points]
    if chart.level is not None:
        ranges.append((chart.level[1], chart.level[1]))
    marks = ticks(*_with_margin(min(low for low, _ in ranges), max(high for _, high in ranges)))
    if len(xs) > MAX_MARKS or chart.is_measured:
        xs = ticks(xs[0], xs[-1], MAX_MARKS) if len(xs) > 1 else ticks(xs[0] - 1, xs[0] + 1, MAX_MARKS)
    margin = 0.08 * (xs[-1] - xs[0]) or 0.05

    def to_x(x: float) -> float:
        return LEFT + (x - xs[0] + margin) / (xs[-1] - xs[0] + 2 * margin) * PLOT_WIDTH

    def to_y(y: float) -> float:
        return BASE - (y - marks[0]) / (marks[-1] - marks[0]) * (BASE - TOP)

    parts = _axes(chart, xs, marks, to_x, to_y)
    legend_y = HEIGHT + 4.0
    if chart.level is not None:
        name, value = chart.level
        style = 'stroke="#444" stroke-dasharray="6 4"'
        parts.append(_line(LEFT, to_y(value), RIGHT, to_y(value), style))
        parts.append(_line(LEFT, legend_y, LEFT + 22, legend_y, style))
        parts.append(_text(LEFT + 30, legend_y + 5, name))
        legend_y += LEGEND_LINE
    for number, series in enumerate(chart.series):
        shift = 0.0 if chart.is_measured else SHIFT * (number - (len(chart.series) - 1) / 2)
        parts += _series(series, COLOURS[number % len(COLOURS)], legend_y, shift, to_x, to_y)
        legend_y += LEGEND_LINE
    return parts


def _with_margin(low: float, high: float) -> tuple[float, float]:
    """A range in which no point lies on the border. Shares in percent stay between 0 and 100."""
    margin = 0.04 * (high - low)
    return max(low - margin, min(low, 0.0)), min(high + margin, max(high, 100.0))


def _axes(
    chart: Chart, xs: Sequence[float], marks: Sequence[float], to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> list[str]:
    letters = int((WIDTH - 20) / LETTER_WIDTH)
    lines = textwrap.wrap(chart.title, letters)
    title = [*lines[: TITLE_LINES - 1], shorten(" ".join(lines[TITLE_LINES - 1 :]), letters)]
    parts = [_text(10, 20 + 18 * row, line, 'font-weight="bold"') for row, line in enumerate(title) if line]
    for mark in marks:
        parts.append(_line(LEFT, to_y(mark), RIGHT, to_y(mark), 'stroke="#e4e4e4"'))
        parts.append(_text(LEFT - 8, to_y(mark) + 4, f"{mark:g}", 'text-anchor="end"'))
    for x in xs:
        parts.append(_line(to_x(x), BASE, to_x(x), BASE + 5, 'stroke="#888"'))
        parts.append(_text(to_x(x), BASE + 20, f"{x:g}", 'text-anchor="middle"'))
    parts.append(_line(LEFT, BASE, RIGHT, BASE, 'stroke="#888"'))
    parts.append(_line(LEFT, TOP, LEFT, BASE, 'stroke="#888"'))
    parts.append(_text((LEFT + RIGHT) / 2, HEIGHT - 18, chart.x, 'text-anchor="middle"'))
    middle = (TOP + BASE) / 2
    parts.append(_text(15, middle, chart.y, f'text-anchor="middle" transform="rotate(-90 15 {middle:.1f})"'))
    return parts


def _series(
    series: Series,
    colour: str,
    legend_y: float,
    shift: float,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
) -> list[str]:
    """A line through the points, their error bars, and the entry in the legend."""
    places = [(to_x(point.x) + shift, to_y(point.y), point) for point in series.points]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    parts = [f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, y, point in places:
        if point.error:
            for end in map(to_y, point.ends):
                parts.append(_line(x, y, x, end, f'stroke="{colour}" stroke-width="1.5"'))
                parts.append(_line(x - 4, end, x + 4, end, f'stroke="{colour}" stroke-width="1.5"'))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
    parts.append(_line(LEFT, legend_y, LEFT + 22, legend_y, f'stroke="{colour}" stroke-width="2"'))
    parts.append(f'<circle cx="{LEFT + 11}" cy="{legend_y:.1f}" r="4" fill="{colour}"/>')
    parts.append(_text(LEFT + 30, legend_y + 5, shorten(series.name, MAX_NAME)))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _text(x: float, y: float, content: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(printable(content))}</text>'.replace(" >", ">")


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
                [[abs(point.ends[side] - point.y) for point in series.points] for side in (0, 1)],
                color=COLOURS[number % len(COLOURS)],
                marker="o",
                capsize=3,
                label=series.name,
            )
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
