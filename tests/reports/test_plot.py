"""Axes of plots: where values lie, and how numbers are written."""

from __future__ import annotations

import itertools

import pytest

from smartprune.reports.draw import Drawing
from smartprune.reports.plot import BOTTOM, LEFT, RIGHT, TOP, short, x_axis, y_axis


def test_x_values_are_mapped_linearly_into_the_plane() -> None:
    to_x = x_axis(Drawing(440, 250, "title"), 10, 30, "step")
    assert (to_x(10), to_x(30)) == (LEFT, RIGHT)
    assert to_x(20) == pytest.approx((LEFT + RIGHT) / 2)


def test_a_logarithmic_axis_has_equal_distances_for_equal_factors() -> None:
    to_y = y_axis(Drawing(440, 250, "title"), 0.01, 100, "loss", log=True)
    heights = [to_y(10.0**power) for power in range(-2, 3)]
    assert heights[0] == pytest.approx(BOTTOM)
    assert heights[-1] == pytest.approx(TOP)
    assert [b - a for a, b in itertools.pairwise(heights)] == pytest.approx([heights[1] - heights[0]] * 4)


@pytest.mark.parametrize(("low", "starts_at_zero"), [(0.1, True), (0.8, False), (-0.5, False)])
def test_a_linear_axis_starts_at_zero_if_that_wastes_little_space(low: float, starts_at_zero: bool) -> None:
    to_y = y_axis(Drawing(440, 250, "title"), low, 1.0, "accuracy", log=False)
    assert (to_y(0.0) == pytest.approx(BOTTOM)) == starts_at_zero
    assert to_y(1.0) >= TOP - 1e-9


def test_every_mark_of_an_axis_has_a_line_and_a_label() -> None:
    drawing = Drawing(440, 250, "title")
    y_axis(drawing, 0, 7, "blocks", log=False, whole=True)
    lines = [stroke for stroke in drawing.strokes if stroke.kind == "line"]
    labels = [stroke.text for stroke in drawing.strokes if stroke.kind == "text"]
    assert len(lines) == len(labels) - 1  # and the name of the axis
    assert labels[-1] == "blocks"
    assert labels[0] == "0"


@pytest.mark.parametrize("value", [0.0, 0.25, 3.0, 1500.0, -2500.0, 2e6, 1e-5, 1.2e-7, 999.0])
def test_short_numbers_have_the_value_they_stand_for(value: float) -> None:
    text = short(value)
    factor = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
    assert float(text.rstrip("kM")) * factor == pytest.approx(value)
