"""``report.html``: one file about one model, for those who decide whether to ship it."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from .. import text
from ..artifacts.receipt import AnyReceipt
from ..artifacts.source import Model, files_of
from ..core.block import Block
from ..files import check_no_overwrite, write_atomic
from ..hardware.estimate import Estimate
from ..run_files import STAGE_NAMES, STAGES
from .figures import Figure, figures
from .layer_table import layer_table
from .plot import BOTTOM, LEFT, RIGHT, TOP, WIDTH
from .runlog import RunLog, finite_number
from .shell import header, html_page, html_text, pairs_table, tiles
from .stored import find_receipt
from .summary import alert, chips, key_figures, kicker, npu_label, origin, verdict
from .view import Array, LayerView, View, gather

MAX_BLOCKS_WITH_VALUES = 1_000_000  # with more, the page leaves out scores and norms
MAX_BLOCKS = 4_000_000  # with more, the page has no block map
CURVES = ("loss", "metric", "temperature", "undecided", "churn")


def write_page(
    path: str | Path,
    model: Model,
    block: Block | str | Sequence[int | None] | None = None,
    estimate: Estimate | None = None,
    network: nn.Module | None = None,
    receipt: AnyReceipt | None = None,
) -> None:
    """Writes the page of a model, a file or a run folder.

    ``estimate`` holds its cycles on an NPU. ``network`` is the module that a file belongs to, ``receipt`` its receipt.
    """
    receipt_file = receipt if isinstance(receipt, (str, os.PathLike)) else find_receipt(model)
    check_no_overwrite(path, {**files_of(model), **({} if receipt_file is None else {"the receipt": receipt_file})}, "report:")
    write_atomic(path, render(gather(model, block, estimate, network, receipt)).encode())


def render(view: View) -> str:
    """The page as text. Facts that are not known are left out."""
    drawn = {figure.key: figure for figure in figures(view)}
    mapped = [layer for layer in view.layers if layer.row.blocks.total <= MAX_BLOCKS]
    if sum(layer.row.blocks.total for layer in mapped) > MAX_BLOCKS:
        mapped = []
    with_values = sum(layer.row.blocks.total for layer in mapped) <= MAX_BLOCKS_WITH_VALUES
    numbers = {layer.row.weight: i for i, layer in enumerate(mapped)}
    sections = [
        ("layers", "Layers", layer_table(view, numbers)),
        ("map-section", "Block map", _map_section(mapped, with_values)),
        ("run", "Training", _charts([drawn[key] for key in CURVES if key in drawn])),
        ("scores", "Scores and mask", _charts([drawn[key] for key in ("scores", "mask") if key in drawn])),
        ("receipt", "Receipt", _receipt_section(view)),
        ("settings", "Settings", _settings_section(view)),
    ]
    sections = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections)
    main = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{body}</section>'
        for key, title, body in sections
    )
    body = (
        f'{header(kicker(view))}<main id="main"><h1>{verdict(view)}</h1>{origin(view)}{chips(view)}'
        f"{alert(view)}{tiles(key_figures(view))}"
        f'<nav aria-label="Parts of this report"><ul>{links}</ul></nav>{main}</main>'
    )
    first = max(range(len(mapped)), key=lambda i: (mapped[i].pruned, mapped[i].row.blocks.total), default=0)
    data = {
        "layers": [_layer_data(layer, with_values) for layer in mapped],
        "first": first,
        "charts": [_chart_data(figure) for figure in drawn.values() if figure.curves],
    }
    return html_page(f"{view.title}: pruning report", body, data)


def _map_section(mapped: Sequence[LayerView], with_values: bool) -> str:
    if not mapped:
        return (
            f'<p class="note">The model has more than {MAX_BLOCKS:,} blocks, too many for this page. '
            "Use <code>smartprune report --map</code> instead.</p>"
        )
    choices = '<option value="kept">kept or removed</option>'
    if with_values:
        choices += '<option value="norms">norm of the weights</option>'
        if any(layer.scores is not None for layer in mapped):
            choices += '<option value="scores">score</option>'
    missing = "" if with_values else f" Scores and norms are left out above {MAX_BLOCKS_WITH_VALUES:,} blocks."
    return (
        '<p class="note">Outputs run downwards and inputs to the right, with one panel per kernel position. Point at a block or '
        "use the arrow keys to read its values. Plus and minus zoom, 0 fits the map, Page Up and Page Down change the layer. Click "
        f"the map to zoom with the wheel and to drag it.{missing}</p>"
        '<div class="tools"><label for="map-layer">Layer <select id="map-layer"></select></label>'
        '<span class="group"><button type="button" id="layer-before" aria-label="Previous layer">\u2190</button>'
        '<button type="button" id="layer-after" aria-label="Next layer">\u2192</button></span>'
        '<label for="map-kernel">Kernel position <select id="map-kernel"></select></label>'
        f'<label for="map-paint">Colour <select id="map-paint">{choices}</select></label>'
        '<span class="group"><button type="button" id="zoom-out" aria-label="Zoom out">\u2212</button>'
        '<button type="button" id="zoom-in" aria-label="Zoom in">+</button>'
        '<button type="button" id="zoom-fit" aria-label="Fit the whole map">Fit</button></span></div>'
        '<div id="map-box"><canvas id="map" tabindex="0" role="application" aria-roledescription="block map" '
        'aria-label="Block map" aria-describedby="map-readout"></canvas></div><output id="map-readout" aria-live="polite"></output>'
    )


def _charts(drawn: Sequence[Figure]) -> str:
    def chart(figure: Figure) -> str:
        readout = '<output aria-live="polite"></output>' if figure.curves else ""
        return (
            f'<figure id="figure-{figure.key}"><div class="chart-head"><h3>{html_text(figure.title)}</h3>{readout}</div>'
            f"{figure.drawing.svg(page=True)}<figcaption>{html_text(figure.note)}</figcaption></figure>"
        )

    return f'<div class="charts">{"".join(map(chart, drawn))}</div>' if drawn else ""


def _receipt_section(view: View) -> str:
    receipt = view.receipt
    if receipt is None:
        return ""
    layers = ",\n".join(f"  {json.dumps(row.to_json())}" for row in receipt.layers)
    fields = [f'"{key}": {json.dumps(value)}' for key, value in receipt.to_json().items() if key != "layers"]
    lines = ("{\n" + ",\n".join([*fields, f'"layers": [\n{layers}\n]']) + "\n}").split("\n")
    return (
        '<p class="note">What was requested and what was achieved, in integers. The hash covers the map of all blocks that are '
        "not zero. <code>smartprune verify</code> computes it again from the weights.</p>"
        f'<div class="hash"><code id="mask-hash">{html_text(receipt.mask_hash)}</code>'
        '<button type="button" class="copy" data-from="mask-hash">Copy the hash</button>'
        '<button type="button" class="copy" data-from="receipt-text">Copy the receipt</button></div>'
        '<details><summary>receipt.json</summary><pre id="receipt-text" tabindex="0" role="region" aria-label="Receipt">'
        f"{chr(10).join(map(html_text, lines))}</pre></details>"
    )


def _settings_section(view: View) -> str:
    tables: list[tuple[str, list[tuple[str, object]]]] = []
    if view.receipt is not None:
        tables.append(("Method", [("method", view.receipt.method), *_flatten(view.receipt.settings)]))
    if view.log is not None:
        tables += _run_tables(view.log)
    if view.estimate is not None:
        tables.append((f"NPU: {npu_label(view.estimate)}", _flatten(view.estimate.npu.to_json())))
    report = view.report
    counts: list[tuple[str, object]] = [("parameters", f"{report.params:,}"), ("zero parameters", f"{report.zeros:,}")]
    tables.append(("Model", [*counts, ("block", report.block)]))
    columns = "".join(f"<div><h3>{html_text(title)}</h3>{pairs_table(rows, title)}</div>" for title, rows in tables)
    settings = _flatten(view.log.config if view.log is not None else {})
    entries = "".join(
        f"<div><dt>{html_text(key)}</dt><dd>{html_text(value)}</dd></div>"
        for key, value in settings
        if not key.startswith("settings.")
    )
    config = f'<details open><summary>config.json</summary><dl class="config">{entries}</dl></details>' if entries else ""
    return f'<div class="columns">{columns}</div>{config}'


def _run_tables(log: RunLog) -> list[tuple[str, list[tuple[str, object]]]]:
    """Time, versions, output files and further metrics of a run."""
    result = log.result or {}
    rows: list[tuple[str, object]] = [("seed", log.config.get("seed", "not known"))]
    stage_seconds = result.get("stage_seconds")
    for stage in STAGES:
        seconds = finite_number(stage_seconds.get(stage)) if isinstance(stage_seconds, dict) else None
        rows += [] if seconds is None else [(f"{STAGE_NAMES[stage]}, s", f"{seconds:,.1f}")]
    if total := finite_number(result.get("seconds")):
        rows.append(("total, s", f"{total:,.1f}"))
    tables = [("Seed and time", rows)]
    for key, title in (("versions", "Versions"), ("files", "Output files")):
        entries = result.get(key)
        if isinstance(entries, dict) and (entries or key == "versions"):
            tables.append((title, list(entries.items())))
    also = result.get("also")
    if isinstance(also, dict) and (metrics := _flatten(also)):
        tables.append(("Other metrics", metrics))
    return tables


def _flatten(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Nested settings as ``outer.inner`` with plain values. Settings that are not set are left out."""
    rows: list[tuple[str, object]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{prefix}{key}.")
        elif value is not None and value != [] and value != "":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else value
            rows.append((f"{prefix}{key}", shown))
    return rows


def _layer_data(layer: LayerView, with_values: bool) -> dict[str, Any]:
    row = layer.row
    return {
        "name": text.escape(row.name or row.weight),
        "transposed": row.transposed,
        "axes": [[axis.parts, axis.length, axis.step] for axis in layer.axes],
        "counts": [int(layer.kept.sum()), row.blocks.total],
        "kept": base64.b64encode(np.packbits(layer.kept, bitorder="little").tobytes()).decode(),
        "norms": _half_floats(layer.norms[layer.kept]) if with_values else None,
        "scores": _half_floats(layer.scores) if with_values and layer.scores is not None else None,
    }


def _half_floats(values: Array) -> list[object]:
    """A factor, and the values divided by it as half-precision floats."""
    finite = np.abs(values[np.isfinite(values)])
    factor = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    return [factor, base64.b64encode((values.astype(np.float64) / factor).astype("<f2").tobytes()).decode()]


def _chart_data(figure: Figure) -> dict[str, object]:
    curve = figure.curves[0]
    return {
        "key": figure.key,
        "width": WIDTH,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
        "span": list(figure.span),
        "x": [x for x, _ in curve.points],
        "y": [float(f"{y:.6g}") for _, y in curve.points],
    }
