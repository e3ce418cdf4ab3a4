"""Line charts with error bars."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from smartprune.experiments.compare.chart import Chart, Point, Series, svg
from smartprune.reports.draw import ticks


def test_charts_of_one_point_and_names_with_markup() -> None:
    chart = Chart("<a> & b", "x", "y", (Series("m" * 90, (Point(0.9, 50.0),)), Series("n", (Point(0.9, 50.0, 0.0),))))
    drawn = ET.fromstring(svg([chart, chart]))
    assert drawn.attrib["height"] == "888"
    assert "<a> & b" in [element.text for element in drawn.iter()]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (97.1, 99.9), (-3, 250), (5, 5), (0.1, 0.1001)])
def test_ticks_cover_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9
    assert marks[-1] >= high - 1e-9
    assert 2 <= len(marks) <= 9
