"""Drawings as SVG and PNG: the same strokes at the same places."""

from __future__ import annotations

import io
import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartprune.reports.draw import COLOURS, SCALE, Drawing, ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawing() -> Drawing:
    out = Drawing(60, 40, 'a "title" & <more>')
    out.box("accent", 10, 10, 30, 20)
    out.line("ink", (0, 35), (60, 35), size=2)
    out.dots("second", [(50, 15)], size=4)
    out.text("quiet", 30, 30, "<b> & text", "middle", 8)
    return out


def test_svg_holds_every_stroke_and_escapes_text() -> None:
    root = ElementTree.fromstring(drawing().svg())
    assert root.get("viewBox") == "0 0 60 40"
    assert root.get("aria-label") == 'a "title" & <more>'
    tags = [element.tag.removeprefix(SVG) for element in root]
    assert tags == ["rect", "rect", "path", "circle", "text"]
    assert root[-1].text == "<b> & text"
    assert root[1].get("fill") == COLOURS["accent"]


def test_a_page_sets_the_colours_itself() -> None:
    assert not any(colour in drawing().svg(page=True) for colour in COLOURS.values())


def test_png_has_the_colours_of_the_strokes_at_their_places() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = image.open(io.BytesIO(drawing().png())).convert("RGB")
    assert pixels.size == (60 * SCALE, 40 * SCALE)

    def colour_at(x: float, y: float) -> str:
        return "#{:02x}{:02x}{:02x}".format(*pixels.getpixel((int(x * SCALE), int(y * SCALE))))

    assert colour_at(20, 15) == COLOURS["accent"]
    assert colour_at(30, 35) == COLOURS["ink"]
    assert colour_at(50, 15) == COLOURS["second"]
    assert colour_at(3, 3) == "#ffffff"


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 8))
def test_ticks_are_evenly_spaced_and_cover_the_range(low: float, span: float, about: int) -> None:
    marks = ticks(low, low + span, about)
    step = marks[1] - marks[0]
    assert 2 <= len(marks) <= about + 2
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= low + span - 1e-6 * step
    assert all(b - a == pytest.approx(step, rel=1e-6) for a, b in itertools.pairwise(marks))
