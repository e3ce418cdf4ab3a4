"""Line charts with error bars."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from smartprune.experiments.compare.chart import Chart, Point, Series, svg
from smartprune.reports.draw import ticks


def test_charts_of_one_point_and_names_with_markup() -> None:
    chart = Chart("<a> & b", "x", "y", (Series("m" * 90, (Point(0.9, 50.0),)), Series("n", (Point(0.9, 50.0, 0.0),))))
    drawn = ET.fromstring(svg([chart, chart]))
    assert drawn.attrib["height"] == "848"
    assert "<a> & b" in [element.text for element in drawn.iter()]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (97.1, 99.9), (-3, 250), (5, 5), (0.1, 0.1001)])
def test_ticks_cover_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
    assert 2 <= len(marks) <= 9


def test_points_and_error_bars_lie_inside_of_the_axes() -> None:
    values = (Point(20.0, 80.0), Point(30.0, 90.0, 2.0), Point(40.0, 100.0))
    drawn = ET.fromstring(svg([Chart("t", "x", "accuracy, %", (Series("n", values),), ("dense", 92.0), True)]))
    circles = [element for element in drawn.iter() if element.tag.endswith("circle")][:3]  # the last one is in the legend
    grid = [float(element.attrib["y1"]) for element in drawn.iter() if element.attrib.get("stroke") == "#e4e4e4"]
    assert [min(grid) <= float(circle.attrib["cy"]) < max(grid) - 4 for circle in circles] == [True] * 3
    labels = [element.text for element in drawn.iter() if element.attrib.get("text-anchor") == "end"]
    assert max(float(label or "") for label in labels) == 100  # a share has no larger marks


def test_error_bars_of_shares_end_at_0_and_100() -> None:
    """A run that collapsed makes the standard deviation larger than the mean."""
    drawn = ET.fromstring(svg([Chart("t", "x", "accuracy, %", (Series("n", (Point(0.9, 50.0, 57.5), Point(0.95, 97.0, 0.5))),))]))
    labels = [float(element.text or "") for element in drawn.iter() if element.attrib.get("text-anchor") == "end"]
    assert (min(labels), max(labels)) == (0, 100)
    assert Point(0.9, 50.0, 57.5).ends == (0, 100)
    assert Point(0.9, 120.0, 30.0).ends == (90, 120)  # not a share: it is not cut below the value itself
    assert Point(0.9, 97.0, 0.5).ends == (96.5, 97.5)
    assert Point(0.9, 97.0).ends == (97, 97)


@pytest.mark.parametrize("words", [5, 20, 60])
def test_a_long_title_takes_at_most_three_lines(words: int) -> None:
    title = " ".join(f"word{number}" for number in range(words))
    drawn = ET.fromstring(svg([Chart(title, "x", "y", (Series("n", (Point(1.0, 2.0),)),))]))
    lines = [element.text or "" for element in drawn.iter() if element.attrib.get("font-weight") == "bold"]
    assert 1 <= len(lines) <= 3
    assert title.startswith(lines[0])
    assert (" ".join(lines) == title) == (words < 60)
