"""The figures of a report: curves of the run, scores and layers. The page shows them, and they can be saved as files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import SmartpruneError
from ..files import write_atomic
from ..run_files import STAGES
from ..text import escape, shorten
from .block_map import block_map
from .draw import Drawing, Point, require_pillow, text_width
from .plot import BOTTOM, HEIGHT, HISTOGRAM_BASE, LEFT, RIGHT, TOP, WIDTH, mark_stages, x_axis, y_axis
from .runlog import RunLog, finite_number, sampled_blocks
from .view import Array, LayerView, View

BINS = 48
MAX_NAMED_LAYERS = 40  # more layers have no names in the figure


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[Point, ...]
    role: str = "accent"


@dataclass(frozen=True)
class Figure:
    """A drawing, with its name in file names and the curves whose values the page shows at the pointer."""

    key: str
    title: str
    note: str
    drawing: Drawing
    curves: tuple[Curve, ...] = ()
    span: tuple[float, float] = (0.0, 1.0)  # x at the left and the right end of the plane


@dataclass(frozen=True)
class CurveKind:
    """A column of ``metrics.jsonl`` and how it is drawn."""

    column: str
    key: str
    title: str
    unit: str
    note: str
    log: bool = False  # logarithmic where the values differ much
    whole: bool = False  # counts of blocks
    factor: float = 1.0


CURVES = (
    CurveKind("loss", "loss", "Loss", "mean per epoch", "Training loss.", log=True),
    CurveKind(
        "tau", "temperature", "Temperature", "tau", "Temperature of the soft mask. It falls until the mask is hard.", log=True
    ),
    CurveKind("undecided", "undecided", "Undecided blocks", "blocks", "Blocks with a mask between 0.01 and 0.99.", whole=True),
    CurveKind("changed", "churn", "Churn", "blocks", "Blocks that switched between kept and removed in the last step.", whole=True),
)


def figures(view: View) -> list[Figure]:
    """Every figure for which there are data."""
    drawn = [layers_figure(view)]
    if view.log is not None:
        drawn += [_curve_figure(view.log, kind) for kind in curve_kinds(view.log)]
    drawn += [scores_figure(view), mask_figure(view)]
    return [figure for figure in drawn if figure is not None]


def select_layers(view: View, name: str | None) -> list[LayerView]:
    """The layer of that name, or all layers without a name. Raises for an unknown name."""
    layers = [layer for layer in view.layers if name in (None, layer.row.name, layer.row.weight)]
    if not layers:
        known = ", ".join(layer.row.name for layer in view.layers)
        raise SmartpruneError(f"figures: there is no layer {name!r}; choose one of: {known}")
    return layers


def save_figures(view: View, folder: str | Path, layer: str | None = None) -> tuple[list[Path], bool]:
    """Writes every figure and the block map of one layer or of all, as SVG and, where Pillow is installed, as PNG.

    Returns the files, and whether PNGs are among them.
    """
    folder, layers = Path(folder), select_layers(view, layer)
    try:
        require_pillow()
        png = True
    except SmartpruneError:
        png = False
    drawings = [(figure.key, figure.drawing) for figure in figures(view)]
    drawings += [(f"map-{number:03}-{_file_name(one.row.name)}", block_map(one)) for number, one in enumerate(layers)]
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"{folder}: the folder cannot be made ({error.strerror or error})") from None
    for key, drawing in drawings:
        written.append(folder / f"{key}.svg")
        write_atomic(written[-1], drawing.svg().encode())
        if png:
            written.append(folder / f"{key}.png")
            write_atomic(written[-1], drawing.png())
    return written, png


def curve_kinds(log: RunLog) -> list[CurveKind]:
    """The curves of a run: the loss, the metric of its task, and the curves of the search."""
    loss, *search = CURVES
    if log.measure is None:
        return [loss, *search]
    metric = CurveKind(log.measure, "metric", log.title, "validation, %", "On the validation split.", factor=100.0)
    return [loss, metric, *search]


def _curve_figure(log: RunLog, kind: CurveKind) -> Figure | None:
    parts: list[list[Point]] = []
    for stage in STAGES:
        rows = [row for row in log.rows if row["stage"] == stage]
        values = [(float(log.run_step(stage, row["step"])), finite_number(row.get(kind.column))) for row in rows]
        parts.append([(x, kind.factor * y) for x, y in values if y is not None])
    if kind.column == "tau":
        parts = [[(x, y) for x, y in part if y > 0] for part in parts]  # the hard mask at the end has temperature 0
    points = [point for part in parts for point in part]
    if len(points) < 2 or (kind.whole and not any(y for _, y in points)):
        return None  # the method has no soft mask
    low, high = min(y for _, y in points), max(y for _, y in points)
    end = float(max(sum(log.stage_steps(stage) for stage in STAGES), points[-1][0]))
    drawing = Drawing(WIDTH, HEIGHT, f"{kind.title} over the steps of the run")
    mark_stages(drawing, log, end)
    to_y = y_axis(drawing, low, high, kind.unit, kind.log and low > 0 and high / low > 20, kind.whole)
    to_x = x_axis(drawing, 0.0, end, "step")
    for part in parts:
        places = [(to_x(x), to_y(y)) for x, y in part]
        if len(places) > 1:
            drawing.line("accent", *places, size=1.75)
        elif places:
            drawing.dots("accent", places)
    return Figure(kind.key, kind.title, kind.note, drawing, (Curve(kind.title, tuple(points)),), (0.0, end))


def scores_figure(view: View) -> Figure | None:
    """A histogram of the scores, split into kept and removed blocks, with the threshold between them."""
    known = view.scores
    if known is None or float(np.ptp(known[0])) == 0:
        return None
    scores, kept = known
    low, high = float(scores.min()), float(scores.max())
    edges = np.linspace(low, high, BINS + 1)
    removed_counts, kept_counts = (np.histogram(scores[which], edges)[0] for which in (~kept, kept))
    drawing = Drawing(WIDTH, HEIGHT, "Histogram of the scores of all blocks, removed and kept")
    most = int((removed_counts + kept_counts).max())
    to_y = y_axis(drawing, HISTOGRAM_BASE, float(max(most, 10)), "blocks", log=True)
    to_x = x_axis(drawing, low, high, "score")
    for i in range(BINS):
        left, right = to_x(edges[i]) + 0.4, to_x(edges[i + 1]) - 0.4
        total = int(removed_counts[i] + kept_counts[i])
        if total:  # the bar is split by its length, because a sum has no meaning on a logarithmic axis
            top = to_y(total)
            border = top + (BOTTOM - top) * (kept_counts[i] / total)
            drawing.box("accent", left, top, right, border)
            drawing.box("dim", left, border, right, BOTTOM)
    note = "Scores at the end of the search. Colours show the share of kept blocks in a bar. The axis of counts is logarithmic."
    border_score = threshold(scores, kept)
    if border_score is not None:
        x = to_x(border_score)
        drawing.line("ink", (x, TOP), (x, BOTTOM), size=1.25, dashed=True)
        on_the_right = x > (LEFT + RIGHT) / 2
        label_x, anchor = (x - 5, "end") if on_the_right else (x + 5, "start")
        drawing.text("ink", label_x, TOP + 10, f"threshold {border_score:.3g}", anchor, 11)
    else:
        note += " No single threshold separates kept from removed blocks, because the budget has costs or floors."
    drawing.box("accent", RIGHT - 118, 7, RIGHT - 109, 16)
    drawing.text("quiet", RIGHT - 105, 15, "kept", size=11)
    drawing.box("dim", RIGHT - 66, 7, RIGHT - 57, 16)
    drawing.text("quiet", RIGHT - 53, 15, "removed", size=11)
    return Figure("scores", "Scores", note, drawing)


def threshold(scores: Array, kept: Array) -> float | None:
    """The border between kept and removed scores; None where they overlap or one of them is empty.

    >>> threshold(np.array([1.0, 2.0, 4.0]), np.array([False, False, True]))
    3.0
    """
    if not kept.any() or kept.all():
        return None
    lowest_kept, highest_removed = float(scores[kept].min()), float(scores[~kept].max())
    return (lowest_kept + highest_removed) / 2 if lowest_kept >= highest_removed else None


def mask_figure(view: View) -> Figure | None:
    """The soft mask of a sample of blocks over the search."""
    if view.log is None:
        return None
    log = view.log
    rows = [row for row in log.rows if row["stage"] == "search" and isinstance(row.get("sample"), list)]
    if len(rows) < 2 or len({len(row["sample"]) for row in rows}) != 1:
        return None
    numbers = [[finite_number(value) for value in row["sample"]] for row in rows]
    values = np.array([[math.nan if number is None else number for number in line] for line in numbers])
    sample = values.shape[1]
    places = sampled_blocks(view.receipt.blocks.total if view.receipt is not None else 0)
    kept = view.receipt.mask().numpy()[places] if view.receipt is not None and len(places) == sample else None
    xs = [float(log.run_step("search", row["step"])) for row in rows]
    drawing = Drawing(WIDTH, HEIGHT, f"Soft mask of {sample} blocks over the steps of the search")
    to_y = y_axis(drawing, 0.0, 1.0, "mask", log=False)
    to_x = x_axis(drawing, float(log.run_step("search", 0)), xs[-1], "step")
    for i in range(sample) if kept is None else np.argsort(kept, kind="stable"):  # kept blocks are drawn last, on top
        role = "dim" if kept is not None and not kept[i] else "accent"
        points = [(to_x(x), to_y(y)) for x, y in zip(xs, values[:, i].tolist(), strict=True) if math.isfinite(y)]
        if len(points) > 1:
            drawing.line(role, *points, size=1.1, opacity=0.75)
    note = f"{sample} blocks, spread evenly over the network." + ("" if kept is None else " Kept blocks are in colour.")
    return Figure("mask", "Soft mask over time", note, drawing)


def layers_figure(view: View) -> Figure | None:
    """The kept share of the blocks and MACs of every layer, in network order."""
    layers = [layer for layer in view.layers if layer.pruned] or list(view.layers)
    with_names = len(layers) <= MAX_NAMED_LAYERS
    names = [shorten(escape(layer.row.name), 26) for layer in layers]
    longest = max(text_width(name, 10) for name in names) if with_names else 0.0
    step = max(6.0, min(26.0, 640 / len(layers)))
    left, top, bottom = LEFT, 30.0, 210.0
    right = left + step * len(layers)
    drawing = Drawing(right + 20, bottom + (longest + 16 if with_names else 40), "Kept share of every layer's blocks and MACs")
    for mark in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * mark / 100
        drawing.line("grid", (left, y), (right, y))
        drawing.text("quiet", left - 7, y + 4, f"{mark}", "end", 11)
    drawing.text("quiet", 8, 15, "kept, %", size=11)
    drawing.box("accent", left + 60, 6, left + 69, 15)
    drawing.text("quiet", left + 73, 15, "blocks", size=11)
    with_macs = any(layer.macs is not None for layer in layers)
    if with_macs:
        drawing.box("second", left + 122, 6, left + 131, 15)
        drawing.text("quiet", left + 135, 15, "MACs", size=11)
    wide = step * (0.36 if with_macs else 0.72)
    for i, layer in enumerate(layers):
        x = left + step * i + step * 0.14
        shares = [("accent", layer.row.blocks.kept / layer.row.blocks.total)]
        if layer.macs is not None and layer.macs.total:
            shares.append(("second", layer.macs.kept / layer.macs.total))
        for j, (role, share) in enumerate(shares):
            drawing.box(role, x + j * wide, bottom - (bottom - top) * share, x + (j + 1) * wide, bottom)
        if with_names:
            drawing.text("quiet", x + step * 0.5, bottom + 8, names[i], "end", 10, vertical=True)
    if not with_names:
        drawing.text("quiet", (left + right) / 2, bottom + 24, f"{len(layers)} layers in network order", "middle", 11)
    drawing.line("axis", (left, bottom), (right, bottom))
    return Figure("layers", "Layers", "Share of the blocks and MACs that every layer keeps.", drawing)


def _file_name(name: str) -> str:
    """A layer's name, reduced to characters that file names may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".")[:60] or "layer"
