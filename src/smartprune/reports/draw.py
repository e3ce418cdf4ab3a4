"""Drawings: a list of strokes, written as SVG, or as PNG where Pillow is installed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..errors import SmartpruneError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# role of a stroke -> its colour on white; the style sheet of a page sets its own colours
COLOURS = {
    "ink": "#1d2327",
    "quiet": "#5b656c",
    "grid": "#e3e7e9",
    "band": "#eef3f3",
    "axis": "#9aa4aa",
    "accent": "#0b6b6b",
    "second": "#b4560f",
    "dim": "#aab4b9",
}
SCALE, SUPERSAMPLING = 3, 2  # pixels of a PNG per unit, and the factor by which it is drawn larger first
LETTER_WIDTH = 0.52  # average width of a letter, as a share of the font size
Point = tuple[float, float]


@dataclass(frozen=True)
class Stroke:
    kind: str  # "line" through the points, "box" between two points, "dot" at every point, "text" at the first point
    role: str
    points: tuple[Point, ...]
    size: float = 1.0  # width of a line, radius of a dot, font size
    opacity: float = 1.0
    text: str = ""
    anchor: str = "start"
    vertical: bool = False  # text that runs upwards
    dashed: bool = False
    bold: bool = False


@dataclass
class Drawing:
    """A figure. Its title is the description for screen readers."""

    width: float
    height: float
    title: str
    strokes: list[Stroke] = field(default_factory=list)

    def line(self, role: str, *points: Point, size: float = 1.0, opacity: float = 1.0, dashed: bool = False) -> None:
        self.strokes.append(Stroke("line", role, points, size, opacity, dashed=dashed))

    def box(self, role: str, left: float, top: float, right: float, bottom: float, opacity: float = 1.0) -> None:
        self.strokes.append(Stroke("box", role, ((left, top), (right, bottom)), opacity=opacity))

    def dots(self, role: str, points: Sequence[Point], size: float = 2.0) -> None:
        self.strokes.append(Stroke("dot", role, tuple(points), size))

    def text(
        self,
        role: str,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        size: float = 12,
        vertical: bool = False,
        bold: bool = False,
    ) -> None:
        self.strokes.append(Stroke("text", role, ((x, y),), size, text=text, anchor=anchor, vertical=vertical, bold=bold))

    def svg(self, page: bool = False) -> str:
        """The figure as SVG. For a ``page``, colours come from its style sheet; a separate file contains them."""
        width, height = f"{self.width:g}", f"{self.height:g}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self.title)}"'
        )
        if page:
            return "".join([f"{head}>", *(_svg(stroke, _by_class) for stroke in self.strokes), "</svg>"])
        size = f' width="{width}" height="{height}" font-family="{FONT}"'
        background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([f"{head}{size}>", background, *(_svg(stroke, _by_colour) for stroke in self.strokes), "</svg>", ""])

    def png(self) -> bytes:
        """The figure as a PNG with three pixels per unit."""
        image_type, draw_type, font_type = require_pillow()
        scale = SCALE * SUPERSAMPLING
        image = image_type.new("RGB", (round(self.width * scale), round(self.height * scale)), "#ffffff")
        pen = draw_type.Draw(image)
        for stroke in self.strokes:
            _paint(stroke, scale, image, pen, image_type, draw_type, font_type)
        image = image.resize((round(self.width * SCALE), round(self.height * SCALE)), image_type.Resampling.LANCZOS)
        out = io.BytesIO()
        image.save(out, "PNG", dpi=(72 * SCALE, 72 * SCALE), optimize=True)
        return out.getvalue()


def require_pillow() -> tuple[Any, Any, Any]:
    """Pillow's Image, ImageDraw and ImageFont. Raises if Pillow is missing or too old."""
    try:
        from PIL import Image, ImageDraw, ImageFont, __version__

        if tuple(map(int, __version__.split(".")[:2])) < (10, 1):  # the first version whose default font has any size
            raise ImportError
    except ImportError:
        raise SmartpruneError("a .png needs Pillow 10.1 or newer; run: pip install pillow") from None
    return Image, ImageDraw, ImageFont


def text_width(text: str, size: float) -> float:
    """The approximate width of a text."""
    return LETTER_WIDTH * size * len(text)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers that cover the range from ``low`` to ``high``.

    >>> ticks(0.12, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    span = max(high - low, 1e-9 * max(1.0, abs(high)))
    power = 10 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


Style = Callable[[str, str], str]


def _by_class(role: str, attribute: str) -> str:
    return f'class="{attribute}-{role}"'


def _by_colour(role: str, attribute: str) -> str:
    return f'fill="{COLOURS[role]}"' if attribute == "fill" else f'fill="none" stroke="{COLOURS[role]}"'


def _svg(stroke: Stroke, style: Style) -> str:
    opacity = "" if stroke.opacity == 1 else f' opacity="{stroke.opacity:g}"'
    (x, y) = stroke.points[0]
    if stroke.kind == "line":
        d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in stroke.points)
        dashes = ' stroke-dasharray="5 4"' if stroke.dashed else ""
        return (
            f'<path d="{d}" {style(stroke.role, "line")} stroke-width="{stroke.size:g}" stroke-linejoin="round"{dashes}{opacity}/>'
        )
    if stroke.kind == "box":
        x2, y2 = stroke.points[1]
        return (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(x2 - x, 0):.2f}" height="{max(y2 - y, 0):.2f}" '
            f"{style(stroke.role, 'fill')}{opacity}/>"
        )
    if stroke.kind == "dot":
        fill = style(stroke.role, "fill")
        return "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{stroke.size:g}" {fill}{opacity}/>' for a, b in stroke.points)
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if stroke.vertical else ""
    anchor = "" if stroke.anchor == "start" else f' text-anchor="{stroke.anchor}"'
    weight = ' font-weight="600"' if stroke.bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{stroke.size:g}"'
    return f"<text {place} {style(stroke.role, 'fill')}{anchor}{weight}{turn}>{escape(stroke.text)}</text>"


def _paint(stroke: Stroke, scale: float, image: Any, pen: Any, image_type: Any, draw_type: Any, font_type: Any) -> None:
    colour = _mix(COLOURS[stroke.role], stroke.opacity)
    points = [(x * scale, y * scale) for x, y in stroke.points]
    if stroke.kind == "line":
        width = max(1, round(stroke.size * scale))
        for piece in _dashes(points, 5 * scale, 4 * scale) if stroke.dashed else [points]:
            pen.line(piece, fill=colour, width=width, joint="curve")
    elif stroke.kind == "box":
        (left, top), (right, bottom) = points
        if right > left and bottom > top:
            pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), fill=colour)
    elif stroke.kind == "dot":
        for x, y in points:
            r = stroke.size * scale
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    else:
        font = font_type.load_default(stroke.size * scale)
        (x, y), anchor = points[0], {"start": "ls", "middle": "ms", "end": "rs"}[stroke.anchor]
        if not stroke.vertical:
            pen.text((x, y), stroke.text, fill=colour, font=font, anchor=anchor)
            return
        length, high = round(pen.textlength(stroke.text, font=font)) + 2, round(2 * stroke.size * scale)
        ink = image_type.new("L", (length, high))
        draw_type.Draw(ink).text((1, 0.7 * high), stroke.text, fill=255, font=font, anchor="ls")
        ink = ink.rotate(90, expand=True)
        down = {"start": length, "middle": length / 2, "end": 0}[stroke.anchor]
        image.paste(colour, (round(x - 0.7 * high), round(y - down)), ink)


def _dashes(points: Sequence[Point], on: float, off: float) -> list[list[Point]]:
    """A dashed straight line as its pieces."""
    (x1, y1), (x2, y2) = points[0], points[-1]
    length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
    starts = [i * (on + off) / length for i in range(int(length / (on + off)) + 1)]
    ends = [min(start + on / length, 1.0) for start in starts]
    return [
        [(x1 + t * (x2 - x1), y1 + t * (y2 - y1)) for t in (start, end)]
        for start, end in zip(starts, ends, strict=True)
        if start < 1
    ]


def _mix(colour: str, opacity: float) -> tuple[int, ...]:
    """The colour on white paper."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(round(255 + opacity * (part - 255)) for part in parts)
