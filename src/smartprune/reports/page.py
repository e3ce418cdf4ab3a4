"""``report.html``: one file for the person who decides whether to ship the model."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from .. import text
from ..artifacts.source import Model, assumed_axes_lines, files_of
from ..budgets import budget_label
from ..core.block import Block
from ..files import check_no_overwrite, write_atomic
from ..hardware.estimate import Estimate
from ..run_files import STAGE_NAMES, STAGES
from .figures import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Figure, figures
from .runlog import number
from .shell import header, name, page, pairs, tiles, words
from .view import Array, LayerView, View, look

MOST_VALUES = 1_000_000  # blocks for which a page holds scores and norms
MOST_BLOCKS = 4_000_000  # blocks for which it holds a map
SIZES, COUNTS = ("smaller", "larger", "about as large"), ("fewer", "more", "about as many")
CURVES = ("loss", "metric", "temperature", "undecided", "churn")


def write_page(
    path: str | Path,
    model: Model,
    block: Block | str | Sequence[int | None] | None = None,
    estimate: Estimate | None = None,
    network: nn.Module | None = None,
) -> None:
    """Writes the page of a model, a file or a run folder; ``estimate`` are its cycles on an NPU, ``network`` what it belongs to."""
    check_no_overwrite(path, files_of(model), "report:")
    write_atomic(path, render(look(model, block, estimate, network)).encode())


def render(view: View) -> str:
    """The page as text. What is not known is not shown."""
    made = {figure.key: figure for figure in figures(view)}
    mapped = [layer for layer in view.layers if layer.row.blocks.total <= MOST_BLOCKS]
    if sum(layer.row.blocks.total for layer in mapped) > MOST_BLOCKS:
        mapped = []
    values = sum(layer.row.blocks.total for layer in mapped) <= MOST_VALUES
    numbers = {layer.row.weight: i for i, layer in enumerate(mapped)}
    sections = [
        ("layers", "Layers", _layers(view, numbers)),
        ("map-section", "Block map", _map(view, mapped, values)),
        ("run", "Training", _charts([made[key] for key in CURVES if key in made])),
        ("scores", "Scores and mask", _charts([made[key] for key in ("scores", "mask") if key in made])),
        ("receipt", "Receipt", _receipt(view)),
        ("settings", "Settings", _settings(view)),
    ]
    known = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in known)
    main = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{body}</section>'
        for key, title, body in known
    )
    body = (
        f'{header(_kicker(view))}<main id="main"><h1>{verdict(view)}</h1>{_chips(view)}{_problems(view)}{tiles(_tiles(view))}'
        f'<nav aria-label="Parts of this report"><ul>{links}</ul></nav>{main}</main>'
    )
    first = max(range(len(mapped)), key=lambda i: (mapped[i].pruned, mapped[i].row.blocks.total), default=0)
    data = {
        "layers": [_layer_data(layer, values) for layer in mapped],
        "first": first,
        "charts": [_chart_data(figure) for figure in made.values() if figure.curves],
    }
    return page(f"{view.title}: pruning report", body, data)


def verdict(view: View) -> str:
    """What was asked and what came of it, in a sentence; escaped."""
    receipt, blocks, story = view.receipt, view.blocks, view.story
    left = f"{blocks.kept:,} of {blocks.total:,} blocks left"
    if receipt is None or receipt.requested is None:
        parts = [f"{_share(blocks.removed, blocks.total)} of the blocks are zero ({left})"]
    elif view.problems:
        parts = ["The weights are not what the receipt says"]
    else:
        asked = receipt.requested
        wanted = f"{100 * float(asked.share):g} % of the {budget_label(asked.kind)}"
        if not receipt.met:
            parts = [
                f"Not as asked: {wanted} were to go, and {asked.used:,} of {asked.total:,} are left where {asked.limit:,} may be"
            ]
        elif asked.kind == "blocks":
            parts = [f"Pruned exactly as asked: {wanted} removed ({left})"]
        else:
            parts = [f"Pruned as asked: {wanted} were to go, {_share(asked.total - asked.used, asked.total)} went ({left})"]
    if story is not None and (pruned := story.figure("pruned")) is not None:
        dense = story.figure("dense")
        change = "" if dense is None else f" (dense {100 * dense:.2f} %, {_points(pruned - dense)})"
        parts.append(f"{story.measure or 'metric'} {100 * pruned:.2f} %{change}")
    if receipt is not None and receipt.model_macs is not None:
        parts.append(f"{_share(receipt.model_macs.kept, receipt.model_macs.total)} of the MACs left")
    if view.sizes is not None and view.sizes[1] * 1.05 < view.sizes[0]:
        parts.append(f"{_times(view.sizes[0] / view.sizes[1], SIZES)} when packed")
    if view.estimate is not None:
        parts.append(f"{_times(view.estimate.speedup, COUNTS)} cycles on an NPU")
    if (found := _measured(view)) is not None:
        parts.append(f"{found[1] / found[2]:.1f}\u00d7 as fast on this CPU")
    return words("; ".join(parts) + ".").replace(" %", "&nbsp;%")


def _tiles(view: View) -> list[tuple[str, str, str]]:
    receipt, story, blocks = view.receipt, view.story, view.blocks
    out = []
    if receipt is not None and receipt.requested is not None:
        asked = receipt.requested
        bound = "exactly" if asked.kind == "blocks" else "at most"
        limit = f"keep {bound} {asked.limit:,} of {asked.total:,}; kept {asked.used:,}"
        below = f"asked: {100 * float(asked.share):g} % of {budget_label(asked.kind)}, {limit}"
    else:
        below = f"{blocks.kept:,} of {blocks.total:,} blocks of {view.report.block} are not zero; nothing says what was asked"
    out.append(("Blocks removed", _share(blocks.removed, blocks.total), below))
    if story is not None and story.result is not None:
        before, pruned = story.figure("dense"), story.figure("pruned")
        value = "not scored" if pruned is None else f"{100 * pruned:.2f} %"
        below = "test split" if before is None else f"test split; dense {100 * before:.2f} %"
        below += "" if before is None or pruned is None else f", {_points(pruned - before)}"
        out.append((story.title, value, below))
    if receipt is not None and receipt.model_macs is not None:
        macs = receipt.model_macs
        fewer = f", {_times(macs.total / macs.kept, COUNTS)}" if macs.kept else ""
        out.append(("MACs left", _share(macs.kept, macs.total), f"{macs.kept:,} of {macs.total:,} per sample{fewer}"))
    if view.sizes is not None:
        dense_size, size = view.sizes
        out.append(("Size, packed", _bytes(size), f"{_bytes(dense_size)} plain, {_times(dense_size / size, SIZES)}"))
    if view.estimate is not None:
        found = view.estimate
        whole, left = found.dense.latency, found.latency
        below = f"{left:,} of {whole:,}, estimated for {_npu(found)}; {found.mac_speedup:.1f}\u00d7 by MACs alone"
        out.append(("Cycles on an NPU", _times(found.speedup, COUNTS), below))
    if story is not None and (measured := _measured(view)) is not None:
        rival, theirs, ours = measured
        below = f"{ours:.3g} ms against {theirs:.3g} ms in {rival}, batch 1"
        int8 = story.times().get("smartprune int8")
        below += "" if int8 is None else f"; int8 {int8:.3g} ms"
        out.append(("Speed on this CPU", f"{theirs / ours:.1f}\u00d7", below))
    return out


def _measured(view: View) -> tuple[str, float, float] | None:
    """The fastest dense engine, its milliseconds and those of our runtime, where they were measured."""
    times = {} if view.story is None else view.story.times()
    dense = {name: ms for name, ms in times.items() if not name.startswith("smartprune") and not name.endswith(("int8", "bf16"))}
    if not dense or "smartprune" not in times:
        return None
    rival = min(dense, key=dense.__getitem__)
    return rival, dense[rival], times["smartprune"]


def _chips(view: View) -> str:
    receipt, result = view.receipt, view.story.result if view.story is not None else None
    out = []
    if receipt is not None and receipt.requested is not None:
        out.append(("good", "as asked") if receipt.met else ("bad", "not as asked"))
    if receipt is not None:
        out.append(
            ("good", "weights agree with the receipt") if not view.problems else ("bad", "weights disagree with the receipt")
        )
    else:
        out.append(("", "no receipt: counted from the weights"))
    if view.story is not None and result is None:
        out.append(("", "the run has not ended"))
    return f'<ul class="chips">{"".join(f"<li class={kind!r}>{words(what)}</li>" for kind, what in out)}</ul>'.replace("'", '"')


def _problems(view: View) -> str:
    found = list(dict.fromkeys([*view.problems, *(f"{weight}: holds NaN or infinity" for weight in view.broken)]))
    if not found:
        return ""
    lines = "".join(f"<li>{words(problem)}</li>" for problem in found[:20])
    more = f"<li>and {len(found) - 20:,} more</li>" if len(found) > 20 else ""
    return f'<div class="alert" role="alert"><strong>Do not ship this file as it is.</strong><ul>{lines}{more}</ul></div>'


def _kicker(view: View) -> str:
    config = view.story.config if view.story is not None else {}
    named = [str(config[key]) for key in ("model", "task", "method") if isinstance(config.get(key), str)]
    return " \u00b7 ".join([view.title, *named, f"blocks of {view.report.block}"])


def _layers(view: View, numbers: Mapping[str, int]) -> str:
    macs = any(layer.macs is not None for layer in view.layers)
    cycles = any(layer.cycles is not None for layer in view.layers)
    total = sum(layer.macs.total for layer in view.layers if layer.macs is not None)
    head = ["Layer", "Weight", "Kept / blocks", "Blocks kept", "Sparsity"]
    kinds = ["", "nowrap wide", "num wide", "", "num"]
    if macs:
        head += ["MACs kept", "Kept / MACs", "Share of MACs"]
        kinds += ["", "num wider", "num wider"]
    else:
        head += ["Kept / weights"]
        kinds += ["num wide"]
    if cycles:
        head, kinds = [*head, "Cycles"], [*kinds, "num"]
    lines = []
    for layer in view.layers:
        row = layer.row
        place = numbers.get(row.weight)
        label = name(row.name or row.weight)
        if place is not None:
            label = f'<button type="button" class="plain" data-layer="{place}" title="Show its blocks">{label}</button>'
        cells = [
            words(text.format_shape(row.shape)),
            f"{row.blocks.kept:,} / {row.blocks.total:,}",
            _bar(row.blocks.kept, row.blocks.total),
            _share(row.blocks.removed, row.blocks.total),
        ]
        if macs:
            found = layer.macs
            cells += (
                ["", "", ""]
                if found is None
                else [_bar(found.kept, found.total, "macs"), f"{found.kept:,} / {found.total:,}", _share(found.total, total)]
            )
        else:
            cells += [f"{row.weights.kept:,} / {row.weights.total:,}"]
        if cycles:
            cells.append("" if layer.cycles is None else f"{layer.cycles[1]:,} / {layer.cycles[0]:,}")
        tags = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds[1:], cells, strict=True))
        quiet = "" if layer.pruned or view.receipt is None else ' class="left-dense"'
        where = "" if place is None else f' data-layer="{place}"'
        lines.append(f'<tr{quiet}{where}><th scope="row">{label}</th>{tags}</tr>')
    titles = "".join(f'<th scope="col" class="{kind}">{title}</th>' for kind, title in zip(kinds, head, strict=True))
    order = (
        "In network order"
        if view.estimate is not None
        else "In the order of the receipt"
        if view.receipt is not None
        else "In the order of the file"
    )
    grey = (
        "; layers that were left dense are grey"
        if view.receipt is not None and any(not layer.pruned for layer in view.layers)
        else ""
    )
    told = " ".join(assumed_axes_lines(view.report.assumed, 1000))
    assumed = f'<p class="note">{words(told.strip())}.</p>' if told else ""
    skipped = "".join(
        f"<tr><th scope='row'>{name(s.name)}</th><td>{words(text.format_shape(s.shape))}</td><td>{words(s.reason)}</td></tr>"
        for s in view.report.skipped
    )
    if skipped:
        title = f"{len(view.report.skipped)} weights that are not cut into blocks"
        skipped = f"<details><summary>{title}</summary><table>{skipped}</table></details>"
    return (
        f'<p class="note">{order}{grey}. A layer opens in the block map below.</p>'
        f'<div class="scroll" id="layer-table" tabindex="0" role="region" aria-label="Table of layers"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>{assumed}{skipped}"
    )


def _map(view: View, mapped: Sequence[LayerView], values: bool) -> str:
    if not mapped:
        return (
            f'<p class="note">The model has more than {MOST_BLOCKS:,} blocks, too many for a page; see smartprune report --map.</p>'
        )
    choices = '<option value="kept">kept or removed</option>'
    if values:
        choices += '<option value="norms">norm of the weights</option>'
        if any(layer.scores is not None for layer in mapped):
            choices += '<option value="scores">score</option>'
    missing = "" if values else f" Scores and norms are left out above {MOST_VALUES:,} blocks."
    return (
        '<p class="note">Outputs run downwards, inputs to the right, one panel per kernel position. Point at a block, or use '
        "the arrow keys; plus and minus zoom, 0 fits, page up and down change the layer. The wheel zooms once the map has the "
        f"focus, dragging moves it.{missing}</p>"
        '<div class="tools"><label for="map-layer">Layer <select id="map-layer"></select></label>'
        '<span class="group"><button type="button" id="layer-before" aria-label="Previous layer">\u2190</button>'
        '<button type="button" id="layer-after" aria-label="Next layer">\u2192</button></span>'
        '<label for="map-kernel">Kernel position <select id="map-kernel"></select></label>'
        f'<label for="map-paint">Colour <select id="map-paint">{choices}</select></label>'
        '<span class="group"><button type="button" id="zoom-out" aria-label="Zoom out">\u2212</button>'
        '<button type="button" id="zoom-in" aria-label="Zoom in">+</button>'
        '<button type="button" id="zoom-fit" aria-label="Fit the whole map">Fit</button></span></div>'
        '<div id="map-box"><canvas id="map" tabindex="0" role="application" aria-roledescription="block map" '
        'aria-label="Block map" aria-describedby="map-said"></canvas></div><output id="map-said" aria-live="polite"></output>'
    )


def _charts(made: Sequence[Figure]) -> str:
    def one(figure: Figure) -> str:
        said = '<output aria-live="polite"></output>' if figure.curves else ""
        return (
            f'<figure id="figure-{figure.key}"><div class="chart-head"><h3>{words(figure.title)}</h3>{said}</div>'
            f"{figure.drawing.svg(page=True)}<figcaption>{words(figure.note)}</figcaption></figure>"
        )

    return f'<div class="charts">{"".join(map(one, made))}</div>' if made else ""


def _receipt(view: View) -> str:
    if view.receipt is None:
        return ""
    found = view.receipt
    layers = ",\n".join(f"  {json.dumps(row.to_json())}" for row in found.layers)
    lines = [f'"{key}": {json.dumps(value)}' for key, value in found.to_json().items() if key != "layers"]
    whole = "{\n" + ",\n".join([*lines, f'"layers": [\n{layers}\n]']) + "\n}"
    return (
        '<p class="note">What was asked and what was done, integer by integer. The hash is that of the map of all blocks that are '
        "not zero; <code>smartprune verify</code> counts it again from the weights.</p>"
        f'<div class="hash"><code id="mask-hash">{words(found.mask_hash)}</code>'
        '<button type="button" class="copy" data-from="mask-hash">Copy the hash</button>'
        '<button type="button" class="copy" data-from="receipt-text">Copy the receipt</button></div>'
        '<details><summary>receipt.json</summary><pre id="receipt-text" tabindex="0" role="region" aria-label="Receipt">'
        f"{_preformatted(whole)}</pre></details>"
    )


def _preformatted(lines: str) -> str:
    return "\n".join(words(line) for line in lines.split("\n"))


def _settings(view: View) -> str:
    story = view.story
    parts = []
    if view.receipt is not None:
        parts.append(("Method", [("method", view.receipt.method), *_flat(view.receipt.settings)]))
    if story is not None:
        result = story.result or {}
        seconds = [(f"{STAGE_NAMES[stage]}, s", taken) for stage in STAGES if (taken := _seconds(result, stage)) is not None]
        whole = number(result.get("seconds"))
        timed = [("seed", story.config.get("seed", "not known")), *seconds, *([("in all, s", f"{whole:,.1f}")] if whole else [])]
        parts.append(("Seed and time", timed))
        versions = result.get("versions")
        if isinstance(versions, dict):
            parts.append(("Versions", list(versions.items())))
        files = result.get("files")
        if isinstance(files, dict) and files:
            parts.append(("Files handed over", list(files.items())))
        also = result.get("also")
        others = _flat(also) if isinstance(also, dict) else []
        if others:
            parts.append(("Other figures", others))
    if view.estimate is not None:
        parts.append((f"NPU: {_npu(view.estimate)}", list(_flat(view.estimate.npu.to_json()))))
    parts.append(
        (
            "Model",
            [("parameters", f"{view.report.params:,}"), ("of them zero", f"{view.report.zeros:,}"), ("block", view.report.block)],
        )
    )
    found = "".join(f"<div><h3>{words(title)}</h3>{pairs(rows, title)}</div>" for title, rows in parts)
    rest = [(key, value) for key, value in _flat(story.config if story is not None else {}) if not key.startswith("settings.")]
    listed = "".join(f"<div><dt>{words(key)}</dt><dd>{words(value)}</dd></div>" for key, value in rest)
    config = f'<details open><summary>config.json</summary><dl class="config">{listed}</dl></details>' if rest else ""
    return f'<div class="columns">{found}</div>{config}'


def _seconds(result: Mapping[str, Any], stage: str) -> str | None:
    found = result.get("stage_seconds")
    taken = number(found.get(stage)) if isinstance(found, dict) else None
    return None if taken is None else f"{taken:,.1f}"


def _flat(values: Mapping[str, object], before: str = "") -> list[tuple[str, object]]:
    """Nested settings as ``outer.inner`` with plain values; what is not set is left out."""
    out: list[tuple[str, object]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{before}{key}.")
        elif value is not None and value != [] and value != "":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else value
            out.append((f"{before}{key}", shown))
    return out


def _layer_data(layer: LayerView, values: bool) -> dict[str, object]:
    row = layer.row
    return {
        "name": text.escape(row.name or row.weight),
        "transposed": row.transposed,
        "axes": [[axis.parts, axis.length, axis.step] for axis in layer.axes],
        "counts": [int(layer.kept.sum()), row.blocks.total],
        "kept": base64.b64encode(np.packbits(layer.kept, bitorder="little").tobytes()).decode(),
        "norms": _halves(layer.norms[layer.kept]) if values else None,
        "scores": _halves(layer.scores) if values and layer.scores is not None else None,
    }


def _halves(found: Array) -> list[object]:
    """A factor, and the values divided by it as half floats."""
    finite = np.abs(found[np.isfinite(found)])
    factor = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    return [factor, base64.b64encode((found.astype(np.float64) / factor).astype("<f2").tobytes()).decode()]


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


def _bar(part: int, whole: int, kind: str = "") -> str:
    share = 100 * part / whole if whole else 0.0
    inner = f'<i style="width:{share:.2f}%"></i>' if part else ""
    return f'<span class="bar {kind}" role="img" aria-label="{share:.1f} %">{inner}</span>'


def _share(part: int, whole: int) -> str:
    return text.percent(part, whole).replace("%", " %")


def _times(ratio: float, named: tuple[str, str, str]) -> str:
    """``2.0x smaller`` for a ratio of 2, ``2.0x larger`` for one of a half."""
    shown, (less, more, same) = f"{max(ratio, 1 / ratio):.1f}", named
    return same if shown == "1.0" else f"{shown}\u00d7 {less if ratio > 1 else more}"


def _points(change: float) -> str:
    points = f"{100 * change:+.2f}"
    return "as the dense model" if float(points) == 0 else f"{points} points".replace("-", "\u2212")


def _bytes(size: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}" if size < 1000 * step else f"{size / step:,.0f} {unit}"
    return f"{size} bytes"


def _npu(estimate: Estimate) -> str:
    npu = estimate.npu
    return f"a {npu.rows}\u00d7{npu.columns} array at {npu.clock_mhz:g} MHz"
