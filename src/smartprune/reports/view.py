"""All that is known about a model, gathered once for its page and its figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..artifacts.counts import Count
from ..artifacts.pack import packed_sizes
from ..artifacts.receipt import Receipt
from ..artifacts.source import Cut, Model, read_source
from ..artifacts.verify import verify
from ..core.block import Axis, Block
from ..core.occupancy import comparable, is_finite
from ..errors import SmartpruneError
from ..hardware.estimate import Estimate
from ..run_files import CONFIG
from .runlog import Story, read_scores, read_story
from .table import Report, ReportRow, cut_source, report_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer. ``kept`` are the blocks of the mask, or where no receipt tells it those that are not zero."""

    row: ReportRow
    pruned: bool  # whether the receipt is about it
    macs: Count | None
    cycles: tuple[int, int] | None  # dense, pruned
    axes: tuple[Axis, ...]  # of its grid
    kept: Array = field(repr=False)
    norms: Array = field(repr=False)  # root of the sum of squares
    scores: Array | None = field(repr=False)

    @property
    def panels(self) -> Array:
        """``kept`` as [kernel positions, output blocks, input blocks]."""
        return to_panels(self.kept, self.row)


@dataclass(frozen=True, eq=False)
class View:
    """A model with what its receipt, its run and an NPU model say about it."""

    title: str
    report: Report
    layers: tuple[LayerView, ...]  # in network order, as far as that is known
    receipt: Receipt | None
    story: Story | None
    sizes: tuple[int, int] | None  # bytes of a plain and of a packed file
    estimate: Estimate | None
    problems: tuple[str, ...] = ()  # where the weights are not what the receipt says
    broken: tuple[str, ...] = ()  # weights that hold NaN or infinity

    @property
    def blocks(self) -> Count:
        """Of the layers that the receipt is about, or of all."""
        return self.report.blocks if self.receipt is None else self.receipt.blocks

    @property
    def scores(self) -> tuple[Array, Array] | None:
        """Scores of all blocks that have one, and whether each was kept."""
        known = [(layer.scores, layer.kept) for layer in self.layers if layer.scores is not None]
        return (np.concatenate([s for s, _ in known]), np.concatenate([k for _, k in known])) if known else None


def look(
    model: Model,
    block: Block | str | Sequence[int | None] | None = None,
    estimate: Estimate | None = None,
    network: nn.Module | None = None,
) -> View:
    """Gathers what there is. ``estimate`` are the cycles on an NPU, which take the network itself to count; ``network`` is the
    one that a file belongs to, and says which layers are transposed or grouped."""
    source = read_source(model, network)
    slices = cut_source(source, block)
    report = report_of(source, slices)
    receipt = source.receipt if source.receipt is not None and source.receipt.block == slices.block else None
    folder = Path(model) if isinstance(model, (str, os.PathLike)) and Path(model).is_dir() else None
    story = read_story(folder) if folder is not None and (folder / CONFIG).exists() else None
    scores = None if folder is None or receipt is None else read_scores(folder, receipt.blocks.total)
    cuts = {cut.weight: (cut, row) for cut, row in zip(slices.cuts, report.layers, strict=True)}
    asked, start = {}, 0
    for entry in receipt.layers if receipt is not None else ():
        own = None if scores is None else scores[start : start + entry.blocks.total]
        asked[entry.weight] = (entry, own)
        start += entry.blocks.total
    cycles = {} if estimate is None else {layer.weight: (layer.dense.latency, layer.pruned.latency) for layer in estimate.layers}
    layers = []
    for weight in dict.fromkeys([*cycles, *asked, *cuts]):
        if weight not in cuts:
            continue
        cut, row = cuts[weight]
        found, own = asked.get(weight, (None, None))
        layers.append(
            LayerView(
                row=row,
                pruned=found is not None,
                macs=None if found is None else found.macs,
                cycles=cycles.get(weight),
                axes=cut.grid.axes,
                kept=(row.occupied if found is None else found.mask()).numpy(),
                norms=_norms(cut),
                scores=own,
            )
        )
    problems = () if receipt is None else verify(model, model=network).problems
    sizes = None if problems else _sizes(model, slices.block, network)
    title = folder.resolve().name if folder is not None else Path(source.where).name
    broken = tuple(cut.weight for cut in slices.cuts if not is_finite(cut.tensor))
    return View(title, report, tuple(layers), receipt, story, sizes, estimate, problems, broken)


def to_panels(values: Array, row: ReportRow) -> Array:
    """A value per block, [n], as [kernel positions, output blocks, input blocks]."""
    outs, ins = (1, 0) if row.transposed else (0, 1)
    grid = np.moveaxis(values.reshape(row.grid), (outs, ins), (-2, -1))
    return grid.reshape(-1, row.grid[outs], row.grid[ins])


def _norms(cut: Cut) -> Array:
    weight: Tensor = comparable(cut.tensor).cpu().double()
    return cut.grid.sum(weight * weight).sqrt().float().numpy()


def _sizes(model: Model, block: Block, network: nn.Module | None) -> tuple[int, int] | None:
    """Bytes of the tensors in a plain file, and in a packed one."""
    try:
        return packed_sizes(model, block, network)
    except SmartpruneError:  # such as weights that no packed file can hold
        return None
