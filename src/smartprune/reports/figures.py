"""The figures of a report, drawn once for its page and for files: curves of a run, scores, layers, block maps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import SmartpruneError
from ..files import write_atomic
from ..run_files import STAGE_NAMES, STAGES
from ..text import escape, shorten
from .draw import Drawing, Point, require_pillow, room, ticks
from .runlog import Story, number, sampled
from .view import Array, LayerView, View

WIDTH, HEIGHT = 440.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 428.0, 24.0, 212.0  # of the plane in which values lie
BINS = 48
WIDEST = 512  # cells of a map's side that are drawn; larger maps share cells


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[Point, ...]
    role: str = "accent"


@dataclass(frozen=True)
class Figure:
    """A drawing with its name in file names, and what a page reads out along its x axis."""

    key: str
    title: str
    note: str
    drawing: Drawing
    curves: tuple[Curve, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)  # x at LEFT and at RIGHT


def figures(view: View) -> list[Figure]:
    """Every figure for which there is something to show."""
    made = [layers_figure(view)]
    if view.story is not None:
        made += [curve for curve in (_curve(view.story, *what) for what in curves_of(view.story)) if curve is not None]
    made += [scores_figure(view), sample_figure(view)]
    return [figure for figure in made if figure is not None]


def mapped(view: View, layer: str | None) -> list[LayerView]:
    """The layer of that name, or all; an error where there is none."""
    chosen = [one for one in view.layers if layer in (None, one.row.name, one.row.weight)]
    if not chosen:
        raise SmartpruneError(f"figures: there is no layer {layer!r}; it has: {', '.join(one.row.name for one in view.layers)}")
    return chosen


def save_figures(view: View, folder: str | Path, layer: str | None = None) -> tuple[list[Path], bool]:
    """Writes every figure, and the map of one layer or of all, as SVG and, where Pillow is installed, as PNG.

    Returns the files, and whether PNGs are among them.
    """
    folder, chosen = Path(folder), mapped(view, layer)
    try:
        require_pillow()
        png = True
    except SmartpruneError:
        png = False
    named = [(figure.key, figure.drawing) for figure in figures(view)]
    named += [(f"map-{number:03}-{_file_name(one.row.name)}", map_drawing(one)) for number, one in enumerate(chosen)]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"{folder}: the folder cannot be made ({error.strerror or error})") from None
    for key, drawing in named:
        written.append(folder / f"{key}.svg")
        write_atomic(written[-1], drawing.svg().encode())
        if png:
            written.append(folder / f"{key}.png")
            write_atomic(written[-1], drawing.png())
    return written, png


def curves_of(story: Story) -> list[tuple[str, str, str, str, bool]]:
    """Key of a row, title, unit, note and whether the axis may be logarithmic, for every curve of a run."""
    measure = story.measure
    return [
        ("loss", "Loss", "mean of an epoch", "Training loss.", True),
        *([(measure, story.title, "validation, %", "On held-out validation data.", False)] if measure else []),
        ("tau", "Temperature", "tau", "Of the soft mask in the search; it falls until the mask is hard.", True),
        ("undecided", "Undecided blocks", "blocks", "Blocks whose mask lies between 0.01 and 0.99.", False),
        ("changed", "Churn", "blocks", "Blocks that changed sides in the last step of an epoch.", False),
    ]


def _curve(story: Story, key: str, title: str, unit: str, note: str, log: bool) -> Figure | None:
    factor = 100.0 if key == story.measure else 1.0
    parts: list[list[Point]] = []
    for stage in STAGES:
        values = [(float(story.at(stage, row["step"])), number(row.get(key))) for row in story.rows if row["stage"] == stage]
        parts.append([(x, factor * y) for x, y in values if y is not None])
    points = [point for part in parts for point in part]
    if log and key == "tau":
        points = [(x, y) for x, y in points if y > 0]  # the last one is that of the hard mask
        parts = [[(x, y) for x, y in part if y > 0] for part in parts]
    if len(points) < 2 or (key in ("undecided", "changed") and not any(y for _, y in points)):
        return None  # a method without a soft mask has nothing undecided
    lows, highs = min(y for _, y in points), max(y for _, y in points)
    log = log and lows > 0 and highs / lows > 20
    end = float(max(sum(story.length(stage) for stage in STAGES), points[-1][0]))
    drawing = Drawing(WIDTH, HEIGHT, f"{title} over the steps of the run")
    _stages(drawing, story, end)
    down = _down_axis(drawing, lows, highs, unit, log, whole=key in ("undecided", "changed"))
    across = _across_axis(drawing, 0.0, end, "step")
    for part in parts:
        places = [(across(x), down(y)) for x, y in part]
        if len(places) > 1:
            drawing.line("accent", *places, size=1.75)
        elif places:
            drawing.dots("accent", places)
    key = "metric" if key == story.measure else {"changed": "churn", "tau": "temperature"}.get(key, key)
    return Figure(key, title, note, drawing, (Curve(title, tuple(points)),), (0.0, end))


def scores_figure(view: View) -> Figure | None:
    """How the scores lie, kept above removed, and where the border between them is."""
    known = view.scores
    if known is None or float(np.ptp(known[0])) == 0:
        return None
    scores, kept = known
    low, high = float(scores.min()), float(scores.max())
    edges = np.linspace(low, high, BINS + 1)
    removed_counts, kept_counts = (np.histogram(scores[which], edges)[0] for which in (~kept, kept))
    drawing = Drawing(WIDTH, HEIGHT, "Histogram of the scores of all blocks, removed and kept")
    most = int((removed_counts + kept_counts).max())
    down = _down_axis(drawing, 0.8, float(max(most, 10)), "blocks", log=True)
    across = _across_axis(drawing, low, high, "score")
    for i in range(BINS):
        left, right = across(edges[i]) + 0.4, across(edges[i + 1]) - 0.4
        both = int(removed_counts[i] + kept_counts[i])
        share = kept_counts[i] / both if both else 0.0
        if both:  # on a logarithmic axis a bar is divided by its length
            top = down(both)
            border = top + (BOTTOM - top) * share
            drawing.box("accent", left, top, right, border)
            drawing.box("dim", left, border, right, BOTTOM)
    border_at = threshold(scores, kept)
    note = "Scores at the end of the search; a bar is coloured by its share of kept blocks. The axis of counts is logarithmic."
    if border_at is not None:
        x = across(border_at)
        drawing.line("ink", (x, TOP), (x, BOTTOM), size=1.25, dashed=True)
        near = x > (LEFT + RIGHT) / 2
        drawing.text("ink", x + (-5 if near else 5), TOP + 10, f"threshold {border_at:.3g}", "end" if near else "start", 11)
    else:
        note += " There is no single threshold: the budget has costs or floors that a block's score alone does not decide."
    drawing.box("accent", RIGHT - 118, 7, RIGHT - 109, 16)
    drawing.text("quiet", RIGHT - 105, 15, "kept", size=11)
    drawing.box("dim", RIGHT - 66, 7, RIGHT - 57, 16)
    drawing.text("quiet", RIGHT - 53, 15, "removed", size=11)
    return Figure("scores", "Scores", note, drawing)


def threshold(scores: Array, kept: Array) -> float | None:
    """The border between kept and removed scores, or None where they overlap or one of them is empty.

    >>> threshold(np.array([1.0, 2.0, 4.0]), np.array([False, False, True]))
    3.0
    """
    if not kept.any() or kept.all():
        return None
    least, most = float(scores[kept].min()), float(scores[~kept].max())
    return (least + most) / 2 if least >= most else None


def sample_figure(view: View) -> Figure | None:
    """The soft mask of a few blocks over the search."""
    if view.story is None:
        return None
    story = view.story
    rows = [row for row in story.rows if row["stage"] == "search" and isinstance(row.get("sample"), list)]
    if len(rows) < 2 or len({len(row["sample"]) for row in rows}) != 1:
        return None
    values = np.array([[number(v) if number(v) is not None else math.nan for v in row["sample"]] for row in rows])
    n = view.receipt.blocks.total if view.receipt is not None else 0
    kept = view.receipt.mask().numpy()[sampled(n)] if view.receipt is not None and len(sampled(n)) == values.shape[1] else None
    xs = [float(story.at("search", row["step"])) for row in rows]
    start, end = float(story.at("search", 0)), xs[-1]
    drawing = Drawing(WIDTH, HEIGHT, f"Soft mask of {values.shape[1]} blocks over the steps of the search")
    down = _down_axis(drawing, 0.0, 1.0, "mask", log=False)
    across = _across_axis(drawing, start, end, "step")
    order = range(values.shape[1]) if kept is None else np.argsort(kept, kind="stable")  # the kept ones on top
    for i in order:
        role = "dim" if kept is not None and not kept[i] else "accent"
        points = [(across(x), down(y)) for x, y in zip(xs, values[:, i].tolist(), strict=True) if math.isfinite(y)]
        if len(points) > 1:
            drawing.line(role, *points, size=1.1, strength=0.75)
    note = f"{values.shape[1]} blocks, spread evenly over the network." + (
        "" if kept is None else " In colour: those kept at the end."
    )
    return Figure("mask", "Soft mask over time", note, drawing)


def layers_figure(view: View) -> Figure | None:
    """Kept blocks and kept MACs of every layer, in network order."""
    layers = [layer for layer in view.layers if layer.pruned] or list(view.layers)
    names = len(layers) <= 40
    longest = max(room(shorten(escape(layer.row.name), 26), 10) for layer in layers) if names else 0.0
    step = max(6.0, min(26.0, 640 / len(layers)))
    left, top, bottom = LEFT, 30.0, 210.0
    right = left + step * len(layers)
    drawing = Drawing(right + 20, bottom + (longest + 16 if names else 40), "Kept share of every layer's blocks and MACs")
    for mark in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * mark / 100
        drawing.line("grid", (left, y), (right, y))
        drawing.text("quiet", left - 7, y + 4, f"{mark}", "end", 11)
    drawing.text("quiet", 8, 15, "kept, %", size=11)
    drawing.box("accent", left + 60, 6, left + 69, 15)
    drawing.text("quiet", left + 73, 15, "blocks", size=11)
    macs = any(layer.macs is not None for layer in layers)
    if macs:
        drawing.box("second", left + 122, 6, left + 131, 15)
        drawing.text("quiet", left + 135, 15, "MACs", size=11)
    wide = step * (0.36 if macs else 0.72)
    for i, layer in enumerate(layers):
        x = left + step * i + step * 0.14
        shares = [("accent", layer.row.blocks.kept / layer.row.blocks.total)]
        if layer.macs is not None and layer.macs.total:
            shares.append(("second", layer.macs.kept / layer.macs.total))
        for j, (role, share) in enumerate(shares):
            drawing.box(role, x + j * wide, bottom - (bottom - top) * share, x + (j + 1) * wide, bottom)
        if names:
            drawing.text("quiet", x + step * 0.5, bottom + 8, shorten(escape(layer.row.name), 26), "end", 10, upright=True)
    if not names:
        drawing.text("quiet", (left + right) / 2, bottom + 24, f"{len(layers)} layers in network order", "middle", 11)
    drawing.line("axis", (left, bottom), (right, bottom))
    return Figure("layers", "Layers", "Share of blocks and of MACs that every layer keeps.", drawing)


def map_drawing(layer: LayerView) -> Drawing:
    """The blocks of a layer, a panel per kernel position, outputs downwards; large maps share cells, the darker the more kept."""
    panels = _binned(layer.panels.astype(np.float64), -(-max(layer.panels.shape[1:]) // WIDEST))
    count, rows, columns = panels.shape
    wide = layer.row.grid[-1] if len(layer.row.grid) > 2 else 1
    cell = max(0.75, min(8.0, 640 / (wide * columns)))
    gap = 10.0
    width, height = wide * (columns * cell + gap) - gap + 20, -(-count // wide) * (rows * cell + gap) - gap + 44
    drawing = Drawing(max(width, 240), height, f"Blocks of {shorten(escape(layer.row.name), 60)}: dark is kept")
    title = f"{shorten(escape(layer.row.name), 40)}: {layer.row.blocks.kept:,} of {layer.row.blocks.total:,} kept"
    drawing.text("ink", 10, 20, title, size=12)
    for number_, panel in enumerate(panels):
        x0, y0 = 10 + (number_ % wide) * (columns * cell + gap), 32 + (number_ // wide) * (rows * cell + gap)
        drawing.box("band", x0, y0, x0 + columns * cell, y0 + rows * cell)
        for r, line in enumerate(panel):
            for start, stop, share in _runs(line):
                drawing.box("accent", x0 + start * cell, y0 + r * cell, x0 + stop * cell, y0 + (r + 1) * cell, round(share, 2))
    return drawing


def _binned(panels: Array, share: int) -> Array:
    """The mean over squares of ``share`` cells; those at the edges may be smaller."""
    if share <= 1:
        return panels
    _, rows, columns = panels.shape
    starts = [np.arange(0, size, share) for size in (rows, columns)]
    sums = np.add.reduceat(np.add.reduceat(panels, starts[0], axis=1), starts[1], axis=2)
    sizes = [np.minimum(share, size - start) for size, start in zip((rows, columns), starts, strict=True)]
    means: Array = sums / (sizes[0][:, None] * sizes[1][None, :])
    return means


def _runs(line: Array) -> Iterable[tuple[int, int, float]]:
    """Stretches of equal values above zero."""
    ends = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
    for start, stop in pairwise(ends):
        if line[start] > 0:
            yield start, stop, max(float(line[start]), 0.12)


def _stages(drawing: Drawing, story: Story, end: float) -> None:
    """A band behind the search, and the names of the stages above."""
    at = 0.0
    for stage in STAGES:
        length = story.length(stage)
        left, right = (LEFT + (RIGHT - LEFT) * x / end for x in (at, at + length))
        if stage == "search":
            drawing.box("band", left, TOP, right, BOTTOM)
        if length and room(STAGE_NAMES[stage], 11) < right - left:
            drawing.text("quiet", (left + right) / 2, TOP - 8, STAGE_NAMES[stage], "middle", 11)
        at += length


def _down_axis(drawing: Drawing, low: float, high: float, name: str, log: bool, whole: bool = False) -> Callable[[float], float]:
    if log:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        every = -(-(last - first) // 5) or 1
        marks = [10.0**power for power in range(first, last + 1, every)]
        bottom, top = (math.log10(low), float(max(last, first + 1))) if low == 0.8 else (float(first), float(max(last, first + 1)))

        def down(y: float) -> float:
            return BOTTOM - (math.log10(y) - bottom) / (top - bottom) * (BOTTOM - TOP)
    else:
        marks = ticks(0.0 if whole or (low >= 0 and low < 0.5 * high) else low, max(high, 1.0) if whole else high, 5)

        def down(y: float) -> float:
            return BOTTOM - (y - marks[0]) / (marks[-1] - marks[0]) * (BOTTOM - TOP)

    for mark in marks:
        y = down(mark)
        if TOP - 1 <= y <= BOTTOM + 1:
            drawing.line("grid", (LEFT, y), (RIGHT, y))
            drawing.text("quiet", LEFT - 7, y + 4, short(mark), "end", 11)
    drawing.text("quiet", 12, (TOP + BOTTOM) / 2, name, "middle", 11, upright=True)
    return down


def _across_axis(drawing: Drawing, low: float, high: float, name: str) -> Callable[[float], float]:
    span = (high - low) or 1.0

    def across(x: float) -> float:
        return LEFT + (x - low) / span * (RIGHT - LEFT)

    for mark in ticks(low, high, 6):
        if low - 1e-9 * span <= mark <= high + 1e-9 * span:
            x = across(mark)
            drawing.line("axis", (x, BOTTOM), (x, BOTTOM + 4))
            drawing.text("quiet", x, BOTTOM + 17, short(mark), "middle", 11)
    drawing.line("axis", (LEFT, BOTTOM), (RIGHT, BOTTOM))
    drawing.text("quiet", (LEFT + RIGHT) / 2, BOTTOM + 33, name, "middle", 11)
    return across


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


def _file_name(name: str) -> str:
    """A layer's name with nothing in it that a file's name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:60] or "layer"
