"""The result of ``report()``: a row per layer, totals, and a text map of the blocks of any layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import avg_pool2d

from .. import text
from ..artifacts.axes import assumed_axes_lines
from ..artifacts.counts import Count, Row, sparsity_line
from ..artifacts.receipt import Receipt
from ..artifacts.source import Cut, Source
from ..core.block import Block
from ..core.layers import Skipped, plain_name
from ..core.occupancy import nonzero
from ..errors import SmartpruneError
from .stored import Stored, summarize

WIDTH = 80
BAR = 14
SHADES, ASCII_SHADES = "·░▒▓█", ".:+*#"


@dataclass(frozen=True, eq=False)
class ReportRow:
    """One weight. A block is kept if the receipt keeps it; without a receipt that lists the layer, if it is not zero.

    ``weights`` counts the numbers in kept blocks as kept, ``zeros`` counts every zero.
    """

    name: str
    weight: str
    kind: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    transposed: bool
    blocks: Count
    weights: Count
    zeros: int
    occupied: Tensor = field(repr=False)  # bool [n]: the blocks that are not zero
    kept: Tensor = field(repr=False)  # bool [n]
    pruned: bool = False  # whether a matching receipt lists it

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "weight": self.weight,
            "kind": self.kind,
            "shape": list(self.shape),
            "grid": list(self.grid),
            "transposed": self.transposed,
            "blocks": self.blocks.to_json(),
            "weights": self.weights.to_json(),
            "zeros": self.zeros,
            "pruned": self.pruned,
        }


@dataclass(frozen=True, eq=False)
class Report:
    """The result of :func:`report`. ``str`` is a table 80 columns wide; ``map(layer)`` draws the blocks of a layer.

    ``receipt`` is the receipt that the weights match. ``problems`` lists differences from the receipt of a folder or a packed file,
    and ``note`` says why a receipt that was found is not used.
    """

    where: str
    block: Block
    layers: tuple[ReportRow, ...]
    skipped: tuple[Skipped, ...]
    params: int  # of the whole model
    zeros: int
    assumed: tuple[str, ...] = ()  # weights whose axes are assumed to be (out, in, ...), without groups
    receipt: Receipt | None = None
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def pruned(self) -> tuple[ReportRow, ...]:
        """The layers that the receipt lists; without a receipt, those that have zero blocks."""
        return tuple(row for row in self.layers if (row.pruned if self.receipt is not None else row.blocks.removed))

    @property
    def blocks(self) -> Count:
        """Blocks of all layers that can be divided into blocks, pruned or not."""
        return Count.sum([row.blocks for row in self.layers])

    @property
    def weights(self) -> Count:
        """Weights of these layers. Weights in removed blocks count as removed."""
        return Count.sum([row.weights for row in self.layers])

    @property
    def sparsity(self) -> float:
        """Share of blocks removed, of the blocks of the pruned layers; without a receipt, of all layers."""
        blocks = self.blocks if self.receipt is None else self.receipt.blocks
        return blocks.removed / blocks.total

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            "where": self.where,
            "block": str(self.block),
            "blocks": self.blocks.to_json(),
            "weights": self.weights.to_json(),
            "pruned_blocks": None if self.receipt is None else self.receipt.blocks.to_json(),
            "mask_hash": None if self.receipt is None else self.receipt.mask_hash,
            "problems": list(self.problems),
            "note": self.note,
            "params": self.params,
            "zeros": self.zeros,
            "axes_assumed": list(self.assumed),
            "layers": [row.to_json() for row in self.layers],
            "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in self.skipped],
        }

    def __repr__(self) -> str:
        line = " ".join(headline(self).split())
        return f"<Report of {self.where}: blocks of {self.block}, {text.counted(len(self.layers), 'layer')}, {line}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, ascii_only: bool | None = None) -> str:
        """The table. By default it is plain ASCII only if standard output cannot show other characters."""
        ascii_only = text.stdout_is_ascii() if ascii_only is None else ascii_only
        rows = [
            (
                row.name,
                text.format_shape(row.shape),
                f"{row.blocks.kept:,}/{row.blocks.total:,}",
                text.bar(row.blocks.kept, row.blocks.total, BAR, ascii_only),
                row.blocks.percent,
                "*" if row.weight in self.assumed else "",
            )
            for row in self.layers
        ]
        suffix = f", blocks of {self.block}"
        lines = [
            text.shorten(text.escape(self.where), WIDTH - len(suffix)) + suffix,
            "",
            headline(self),
            *notes(self),
            "",
            *text.table(("layer", "weight", "kept/blocks", "kept", "sparsity", ""), rows, "<<><><", WIDTH, (0, 1)),
        ]
        if self.skipped:
            skipped = [(s.name, text.format_shape(s.shape), s.reason) for s in self.skipped]
            lines += ["", *text.table(("skipped", "weight", "reason"), skipped, "<<<", WIDTH, (0, 2))]
        counts = [(name, f"{total:,}", f"{zero:,}", text.percent(zero, total)) for name, total, zero in _totals(self)]
        header = ("", "total", "zero" if self.receipt is None else "removed", "share")
        lines += ["", *text.table(header, counts, "<>>>", WIDTH)]
        return "\n".join([*lines, *assumed_axes_lines(self.assumed, WIDTH, mark="* ")])

    def map(self, layer: str, ascii_only: bool | None = None) -> str:
        """The blocks of one layer: a character per block, a panel per kernel position, output channels downwards.

        In a layer with more columns than fit, several blocks share a character. It is darker the more of them are kept.
        """
        row = next((row for row in self.layers if layer in (row.name, row.weight)), None)
        if row is None:
            known = ", ".join(row.name for row in self.layers)
            raise SmartpruneError(f"report: there is no layer {layer!r}; choose one of: {known}")
        shades = ASCII_SHADES if (text.stdout_is_ascii() if ascii_only is None else ascii_only) else SHADES
        outs, ins = (1, 0) if row.transposed else (0, 1)
        kernel = row.grid[2:]
        panels = row.kept.reshape(row.grid).float().movedim((outs, ins), (-2, -1))
        panels = panels.reshape(math.prod(kernel), row.grid[outs], row.grid[ins])
        side = -(-panels.shape[2] // WIDTH)  # of the squares of blocks that share a character
        if side > 1:
            panels = avg_pool2d(panels[:, None], side, ceil_mode=True, count_include_pad=False)[:, 0]
        drawn = [_draw(panel, shades) for panel in panels]
        names = [_position(i, kernel) for i in range(len(drawn))]
        lines = textwrap.wrap(
            f"{text.escape(row.name)}: {row.blocks.kept:,} of {row.blocks.total:,} blocks of {self.block} kept; "
            f"{shades[-1]} kept, {shades[0]} {'removed' if row.pruned else 'zero'}",
            WIDTH,
        )
        lines += [f"{side}x{side} blocks per character"] if side > 1 else []
        across = kernel[-1] if kernel and kernel[-1] * (len(drawn[0][0]) + 2) <= WIDTH + 2 else 1
        for first in range(0, len(drawn), across):
            group, titles = drawn[first : first + across], names[first : first + across]
            width = len(group[0][0])
            if kernel and width >= len(titles[0]):
                lines.append("  ".join(f"{title:<{width}}" for title in titles).rstrip())
            else:
                lines.append(" ".join(titles) if kernel else "")
            lines += ["  ".join(parts) for parts in zip(*group, strict=True)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Slices:
    """The weights of a source divided into blocks, and the weights that could not be."""

    block: Block
    cuts: tuple[Cut, ...]
    skipped: tuple[Skipped, ...]


def cut_source(source: Source, block: Block | str | Sequence[int | None] | None) -> Slices:
    """Divides the weights into ``block``, by default into the block of the source, else into 16x8."""
    if block is None:
        block = (source.block or (16, 8)) if source.receipt is None else source.receipt.block
    block = Block.of(block)
    cuts, skipped = source.cuts(block)
    if not cuts:
        reasons = "; ".join(f"{s.name}: {s.reason}" for s in skipped) or "no tensor has two axes or more"
        raise SmartpruneError(f"{source.where}: no weight can be cut into blocks of {block} ({reasons})")
    return Slices(block, cuts, skipped)


def report_of(stored: Stored, slices: Slices) -> Report:
    """Counts the zero blocks of weights that are divided into blocks."""
    source, receipt = stored.source, stored.matching
    listed = {} if receipt is None else {plain_name(row.weight): row for row in receipt.layers}
    return Report(
        where=source.where,
        block=slices.block,
        layers=tuple(_row(cut, listed.get(plain_name(cut.weight))) for cut in slices.cuts),
        skipped=slices.skipped,
        params=source.params,
        zeros=source.zeros,
        assumed=tuple(cut.weight for cut in slices.cuts if cut.assumed),
        receipt=receipt,
        problems=stored.problems,
        note=stored.note,
    )


def headline(report: Report) -> str:
    """The share of zeros that is known for certain, in one line.

    With a receipt, it is the sparsity. Without one it is the share of all blocks, or of single weights where axes are assumed.
    """
    if report.receipt is not None:
        return sparsity_line(report.receipt.blocks)
    if report.assumed:
        share = text.percent(report.zeros, report.params)
        return f"zeros    {share}: {report.zeros:,} of {report.params:,} single weights of the model are zero"
    layers = "the only layer" if len(report.layers) == 1 else f"all {len(report.layers)} layers"
    blocks = report.blocks
    return f"zeros    {blocks.percent}: {blocks.removed:,} of {blocks.total:,} blocks of {layers} are zero"


def notes(report: Report) -> list[str]:
    """Lines below the headline: what it does not say, and why."""
    lines = []
    if report.problems:
        lines.append(f"the weights do NOT match the receipt: {summarize(report.problems)}")
    elif report.note:
        lines.append(report.note)
    elif report.receipt is None:
        lines.append("no receipt found, so it is not known which layers were pruned; give it by receipt= or --receipt FILE")
    if report.assumed:
        lines.append("layers with * may be counted wrongly, because the order of their axes is assumed (see below)")
    if report.receipt is not None and (empty := sum(int((row.kept & ~row.occupied).sum()) for row in report.pruned)):
        lines.append(f"{empty:,} kept blocks hold only zeros")
    wrapped = [textwrap.wrap(text.escape(line), WIDTH - 9, break_on_hyphens=False) for line in lines]
    return [f"{'' if i else 'note':<9}{line}" for part in wrapped for i, line in enumerate(part)]


def _totals(report: Report) -> list[tuple[str, int, int]]:
    """Name, total and zero part of every sum; with a receipt, the sums of the receipt come first."""
    blocks, weights, receipt = report.blocks, report.weights, report.receipt
    single = ("single zeros, of all stored weights", report.params, report.zeros)
    if receipt is None:
        of = "axes assumed" if report.assumed else "all layers above"
        rows = [
            (f"zero blocks, {of}", blocks.total, blocks.removed),
            (f"weights in zero blocks, {of}", weights.total, weights.removed),
        ]
        rows += [] if report.assumed else [("weights in zero blocks, of the model", report.params, weights.removed)]
        return [*rows, single]
    sums = {
        "blocks of the pruned layers": receipt.blocks,
        "blocks of all layers above" + (", some axes assumed" if report.assumed else ""): blocks,
        "weights of the pruned layers": receipt.weights,
        "weights of the model": receipt.model_weights,
        "MACs of the pruned layers": receipt.macs,
        "MACs of the model": receipt.model_macs,
    }
    return [*((name, count.total, count.removed) for name, count in sums.items() if count is not None), single]


def _row(cut: Cut, listed: Row | None) -> ReportRow:
    try:
        nonzeros = nonzero(cut.tensor)
    except SmartpruneError as error:
        raise SmartpruneError(f"{cut.weight}: {error}") from None
    bits = cut.grid.sum(nonzeros).bool().cpu()
    kept = bits if listed is None else listed.mask()
    return ReportRow(
        name=cut.name,
        weight=cut.weight,
        kind=cut.kind,
        shape=cut.grid.weight_shape,
        grid=cut.grid.shape,
        transposed=cut.transposed,
        blocks=Count(cut.grid.n, int(kept.sum())),
        weights=Count(nonzeros.numel(), int(cut.grid.sizes()[kept].sum())),
        zeros=nonzeros.numel() - int(nonzeros.sum()),
        occupied=bits,
        kept=kept,
        pruned=listed is not None,
    )


def _draw(panel: Tensor, shades: str) -> list[str]:
    """A character per entry. Only 0 has the lightest shade and only 1 the darkest."""
    top = len(shades) - 1
    return [
        "".join(shades[0 if v <= 0 else top if v >= 1 else min(max(round(v * top), 1), top - 1)] for v in line)
        for line in panel.tolist()
    ]


def _position(index: int, kernel: Sequence[int]) -> str:
    """The kernel position of a panel, such as ``0,2``."""
    position = []
    for size in reversed(kernel):
        index, remainder = divmod(index, size)
        position.append(str(remainder))
    return ",".join(reversed(position))
