"""The plane of a plot: axes with ticks, and the stages of a run behind the curves."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..run_files import STAGE_NAMES, STAGES
from .draw import Drawing, text_width, ticks
from .runlog import RunLog

WIDTH, HEIGHT = 440.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 428.0, 24.0, 212.0  # of the plane in which values lie
HISTOGRAM_BASE = 0.8  # the lowest value of a logarithmic axis of counts, so that a count of 1 has a visible bar


def mark_stages(drawing: Drawing, log: RunLog, end: float) -> None:
    """A band behind the search, and the names of the stages above the plane."""
    start = 0.0
    for stage in STAGES:
        steps = log.stage_steps(stage)
        left, right = (LEFT + (RIGHT - LEFT) * x / end for x in (start, start + steps))
        if stage == "search":
            drawing.box("band", left, TOP, right, BOTTOM)
        if steps and text_width(STAGE_NAMES[stage], 13) < right - left:
            drawing.text("quiet", (left + right) / 2, TOP - 8, STAGE_NAMES[stage], "middle", 11)
        start += steps


def y_axis(drawing: Drawing, low: float, high: float, name: str, log: bool, whole: bool = False) -> Callable[[float], float]:
    """Draws the axis and returns the function from values to heights. ``whole`` is for counts, which start at 0."""
    if log:
        marks, to_y = _log_scale(low, high)
    else:
        starts_at_zero = whole or (low >= 0 and low < 0.5 * high)
        marks = ticks(0.0 if starts_at_zero else low, max(high, 1.0) if whole else high, 5)

        def to_y(y: float) -> float:
            return BOTTOM - (y - marks[0]) / (marks[-1] - marks[0]) * (BOTTOM - TOP)

    for mark in marks:
        y = to_y(mark)
        if TOP - 1 <= y <= BOTTOM + 1:
            drawing.line("grid", (LEFT, y), (RIGHT, y))
            drawing.text("quiet", LEFT - 7, y + 4, short(mark), "end", 11)
    drawing.text("quiet", 12, (TOP + BOTTOM) / 2, name, "middle", 11, vertical=True)
    return to_y


def _log_scale(low: float, high: float) -> tuple[list[float], Callable[[float], float]]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = -(-(last - first) // 5) or 1
    marks = [10.0**power for power in range(first, last + 1, every)]
    bottom = math.log10(low) if low == HISTOGRAM_BASE else float(first)
    top = float(max(last, first + 1))

    def to_y(y: float) -> float:
        return BOTTOM - (math.log10(y) - bottom) / (top - bottom) * (BOTTOM - TOP)

    return marks, to_y


def x_axis(drawing: Drawing, low: float, high: float, name: str) -> Callable[[float], float]:
    """Draws the axis and returns the function from values to positions."""
    span = (high - low) or 1.0

    def to_x(x: float) -> float:
        return LEFT + (x - low) / span * (RIGHT - LEFT)

    for mark in ticks(low, high, 6):
        if low - 1e-9 * span <= mark <= high + 1e-9 * span:
            x = to_x(mark)
            drawing.line("axis", (x, BOTTOM), (x, BOTTOM + 4))
            drawing.text("quiet", x, BOTTOM + 17, short(mark), "middle", 11)
    drawing.line("axis", (LEFT, BOTTOM), (RIGHT, BOTTOM))
    drawing.text("quiet", (LEFT + RIGHT) / 2, BOTTOM + 33, name, "middle", 11)
    return to_x


def short(value: float) -> str:
    """A number for an axis.

    >>> short(1500), short(2e6), short(0.00001), short(0.25)
    ('1.5k', '2M', '1e-5', '0.25')
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:g}k"
    if value != 0 and abs(value) < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"
