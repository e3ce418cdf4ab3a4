"""The table of layers on a report page."""

from __future__ import annotations

from collections.abc import Mapping

from .. import text
from ..artifacts.axes import assumed_axes_lines
from .shell import html_name, html_text
from .summary import share
from .view import LayerView, View


def layer_table(view: View, numbers: Mapping[str, int]) -> str:
    """All layers with their kept blocks, MACs and cycles. ``numbers`` are the positions of weights in the block map."""
    columns = _columns(view)
    titles = "".join(f'<th scope="col" class="{kind}">{title}</th>' for title, kind in columns)
    kinds = [kind for _, kind in columns[1:]]
    lines = "".join(_line(view, layer, kinds, numbers.get(layer.row.weight)) for layer in view.layers)
    order = (
        "In network order"
        if view.estimate is not None
        else "In the order of the receipt"
        if view.receipt is not None
        else "In the order of the file"
    )
    some_dense = view.receipt is not None and any(not layer.pruned for layer in view.layers)
    grey = ". Layers that were left dense are grey" if some_dense else ""
    return (
        f'<p class="note">{order}{grey}. Click a layer to open it in the block map.</p>'
        f'<div class="scroll" id="layer-table" tabindex="0" role="region" aria-label="Table of layers"><table>'
        f"<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>{_assumed_axes(view)}{_skipped(view)}"
    )


def _columns(view: View) -> list[tuple[str, str]]:
    """Title and classes of every column."""
    columns = [("Layer", ""), ("Weight", "nowrap mid"), ("Kept / blocks", "num wide"), ("Blocks kept", ""), ("Sparsity", "num")]
    if _has_macs(view):
        columns += [("MACs kept", "wide"), ("Kept / MACs", "num wider"), ("Share of the pruned layers\u2019 MACs", "num wider")]
    else:
        columns += [("Kept / weights", "num wide")]
    return [*columns, ("Cycles, pruned / dense", "num wide")] if _has_cycles(view) else columns


def _has_macs(view: View) -> bool:
    return any(layer.macs is not None for layer in view.layers)


def _has_cycles(view: View) -> bool:
    return any(layer.cycles is not None for layer in view.layers)


def _line(view: View, layer: LayerView, kinds: list[str], number: int | None) -> str:
    row, macs = layer.row, layer.macs
    cells = [
        html_text(text.format_shape(row.shape)),
        f"{row.blocks.kept:,} / {row.blocks.total:,}",
        _bar(row.blocks.kept, row.blocks.total, "blocks"),
        share(row.blocks.removed, row.blocks.total) + (" *" if row.weight in view.report.assumed else ""),
    ]
    if not _has_macs(view):
        cells += [f"{row.weights.kept:,} / {row.weights.total:,}"]
    elif macs is None:
        cells += ["", "", ""]
    else:
        total = sum(layer.macs.total for layer in view.layers if layer.macs is not None)
        cells += [_bar(macs.kept, macs.total, "MACs"), f"{macs.kept:,} / {macs.total:,}", share(macs.total, total)]
    if _has_cycles(view):
        cells.append("" if layer.cycles is None else f"{layer.cycles[1]:,} / {layer.cycles[0]:,}")
    name = html_name(row.name or row.weight)
    if number is not None:
        name = f'<button type="button" class="plain" data-layer="{number}" title="Show its blocks">{name}</button>'
    tags = "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, cells, strict=True))
    grey = "" if layer.pruned or view.receipt is None else ' class="left-dense"'
    position = "" if number is None else f' data-layer="{number}"'
    return f'<tr{grey}{position}><th scope="row">{name}</th>{tags}</tr>'


def _bar(part: int, whole: int, unit: str) -> str:
    filled = f'<i style="width:{100 * part / whole:.2f}%"></i>' if part else ""
    label = f"{share(part, whole)} of its {unit} kept"
    return f'<span class="bar {unit.lower()}" role="img" aria-label="{label}">{filled}</span>'


def _assumed_axes(view: View) -> str:
    """A note on weights whose axes are not known for certain."""
    note = " ".join(assumed_axes_lines(view.report.assumed, 1000, mark="* ")).strip()
    return f'<p class="note">{html_text(note)}.</p>' if note else ""


def _skipped(view: View) -> str:
    skipped = view.report.skipped
    if not skipped:
        return ""
    lines = "".join(
        f"<tr><th scope='row'>{html_name(s.name)}</th><td>{html_text(text.format_shape(s.shape))}</td>"
        f"<td>{html_text(s.reason)}</td></tr>"
        for s in skipped
    )
    weights = "1 weight" if len(skipped) == 1 else f"{len(skipped)} weights"
    return f"<details><summary>{weights} not divided into blocks</summary><table>{lines}</table></details>"
