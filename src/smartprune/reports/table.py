"""``report()``: a row per layer, totals, and a text map of the blocks of any layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.functional import avg_pool2d

from .. import text
from ..artifacts.counts import Count
from ..artifacts.source import Cut, Model, Source, assumed_axes_lines, read_source, stored_and_network
from ..core.block import Block
from ..core.layers import Skipped
from ..core.occupancy import nonzero
from ..errors import SmartpruneError

WIDTH = 80
BAR = 14
SHADES, ASCII_SHADES = "·░▒▓█", ".:+*#"


@dataclass(frozen=True, eq=False)
class ReportRow:
    """One weight. ``weights`` counts the numbers in non-zero blocks as kept, ``zeros`` counts every zero."""

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
        }


@dataclass(frozen=True, eq=False)
class Report:
    """The result of :func:`report`. ``str`` is a table 80 columns wide; ``map(layer)`` draws the blocks of a layer."""

    where: str
    block: Block
    layers: tuple[ReportRow, ...]
    skipped: tuple[Skipped, ...]
    params: int  # of the whole model
    zeros: int
    assumed: tuple[str, ...] = ()  # weights whose axes are assumed to be (out, in, ...), without groups

    @property
    def pruned(self) -> tuple[ReportRow, ...]:
        """The layers that have zero blocks."""
        return tuple(row for row in self.layers if row.blocks.removed)

    @property
    def blocks(self) -> Count:
        """Blocks of all layers that can be divided into blocks."""
        return Count.sum([row.blocks for row in self.layers])

    @property
    def weights(self) -> Count:
        """Weights of these layers. Weights in zero blocks count as removed."""
        return Count.sum([row.weights for row in self.layers])

    @property
    def sparsity(self) -> float:
        """Share of zero blocks, over all layers that can be divided into blocks."""
        return self.blocks.removed / self.blocks.total

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return {
            "where": self.where,
            "block": str(self.block),
            "blocks": self.blocks.to_json(),
            "weights": self.weights.to_json(),
            "pruned_blocks": Count.sum([row.blocks for row in self.pruned]).to_json(),
            "params": self.params,
            "zeros": self.zeros,
            "axes_assumed": list(self.assumed),
            "layers": [row.to_json() for row in self.layers],
            "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in self.skipped],
        }

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
                text.percent(row.blocks.removed, row.blocks.total),
            )
            for row in self.layers
        ]
        suffix = f", blocks of {self.block}"
        lines = [
            text.shorten(text.escape(self.where), WIDTH - len(suffix)) + suffix,
            "",
            *text.table(("layer", "weight", "kept/blocks", "kept", "sparsity"), rows, "<<><>", WIDTH, (0, 1)),
        ]
        if self.skipped:
            skipped = [(s.name, text.format_shape(s.shape), s.reason) for s in self.skipped]
            lines += ["", *text.table(("skipped", "weight", "reason"), skipped, "<<<", WIDTH, (0, 2))]
        pruned = Count.sum([row.blocks for row in self.pruned])
        totals = [
            ("blocks, layers with zero blocks", pruned.total, pruned.removed),
            ("blocks, all layers above", self.blocks.total, self.blocks.removed),
            ("weights in zero blocks", self.weights.total, self.weights.removed),
            ("weights in zero blocks, whole model", self.params, self.weights.removed),
            ("single zeros, whole model", self.params, self.zeros),
        ]
        counts = [(name, f"{total:,}", f"{zero:,}", text.percent(zero, total)) for name, total, zero in totals]
        lines += ["", *text.table(("", "total", "zero", "share"), counts, "<>>>", WIDTH)]
        return "\n".join([*lines, *assumed_axes_lines(self.assumed, WIDTH)])

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
        panels = row.occupied.reshape(row.grid).float().movedim((outs, ins), (-2, -1))
        panels = panels.reshape(math.prod(kernel), row.grid[outs], row.grid[ins])
        side = -(-panels.shape[2] // WIDTH)  # of the squares of blocks that share a character
        if side > 1:
            panels = avg_pool2d(panels[:, None], side, ceil_mode=True, count_include_pad=False)[:, 0]
        drawn = [_draw(panel, shades) for panel in panels]
        names = [_position(i, kernel) for i in range(len(drawn))]
        lines = textwrap.wrap(
            f"{text.escape(row.name)}: {row.blocks.kept:,} of {row.blocks.total:,} blocks of {self.block} kept; "
            f"{shades[-1]} kept, {shades[0]} zero",
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


def report(
    stored: Model | None = None,
    /,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    model: Model | None = None,
) -> Report:
    """Counts the zero blocks of every layer of a model, state dict, file or run folder (see :func:`smartprune.verify`).

    ``block`` defaults to the block of the receipt or of the packed file, else to 16x8. ``model`` is the torch.nn.Module
    that a state dict or a file belongs to: it says which layers are transposed or grouped. Without it, axes that are not
    known are assumed to be (out, in, ...), and ``assumed`` lists those weights.

    >>> import torch
    >>> w = torch.zeros(4, 6)
    >>> w[:2, 2:] = 1
    >>> result = report({"fc.weight": w}, block=(2, 2))
    >>> result.blocks.kept, result.blocks.total
    (2, 6)
    >>> print(result.map("fc", ascii_only=True))
    fc: 2 of 6 blocks of 2x2x1x1 kept; # kept, . zero
    <BLANKLINE>
    .##
    ...
    """
    source = read_source(*stored_and_network(stored, model, "report"))
    return report_of(source, cut_source(source, block))


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


def report_of(source: Source, slices: Slices) -> Report:
    """Counts the zero blocks of a source that is divided into blocks."""
    block, cuts, skipped = slices.block, slices.cuts, slices.skipped
    assumed = tuple(cut.weight for cut in cuts if cut.assumed)
    return Report(source.where, block, tuple(_row(cut) for cut in cuts), skipped, source.params, source.zeros, assumed)


def _row(cut: Cut) -> ReportRow:
    try:
        nonzeros = nonzero(cut.tensor)
    except SmartpruneError as error:
        raise SmartpruneError(f"{cut.weight}: {error}") from None
    bits = cut.grid.sum(nonzeros).bool().cpu()
    return ReportRow(
        name=cut.name,
        weight=cut.weight,
        kind=cut.kind,
        shape=cut.grid.weight_shape,
        grid=cut.grid.shape,
        transposed=cut.transposed,
        blocks=Count(cut.grid.n, int(bits.sum())),
        weights=Count(nonzeros.numel(), int(cut.grid.sizes()[bits].sum())),
        zeros=nonzeros.numel() - int(nonzeros.sum()),
        occupied=bits,
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
