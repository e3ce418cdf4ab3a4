"""Gathers what a report shows about a model, for its page and its figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..artifacts.counts import Count, Row
from ..artifacts.pack import packed_sizes
from ..artifacts.receipt import AnyReceipt, Receipt
from ..artifacts.source import Cut, Model
from ..core.block import Axis, Block
from ..core.layers import plain_name
from ..core.occupancy import comparable, is_finite
from ..errors import SmartpruneError
from ..hardware.estimate import Estimate
from ..run_files import CONFIG
from .runlog import RunLog, read_run_log, read_scores
from .stored import read_stored
from .table import Report, ReportRow, Slices, cut_source, report_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer. ``kept`` are the blocks that a matching receipt keeps; without one, the blocks that are not zero."""

    row: ReportRow
    pruned: bool  # whether the receipt lists it
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
    """A model, with its receipt, the log of its run and an estimate of its NPU cycles, as far as they are known."""

    title: str
    report: Report
    layers: tuple[LayerView, ...]  # in network order, if that is known
    receipt: Receipt | None
    log: RunLog | None
    sizes: tuple[int, int] | None  # bytes of a plain file and of a packed file
    estimate: Estimate | None
    nonfinite: tuple[str, ...] = ()  # weights that hold NaN or infinity

    @property
    def problems(self) -> tuple[str, ...]:
        """Differences between the weights and the receipt."""
        return self.report.problems

    @property
    def blocks(self) -> Count:
        """The blocks of the pruned layers; without a receipt that the weights match, of all layers."""
        return self.report.blocks if self.report.receipt is None else self.report.receipt.blocks

    @property
    def scores(self) -> tuple[Array, Array] | None:
        """The scores of all blocks that have one, and whether each was kept."""
        known = [(layer.scores, layer.kept) for layer in self.layers if layer.scores is not None]
        return (np.concatenate([s for s, _ in known]), np.concatenate([k for _, k in known])) if known else None


def gather(
    model: Model,
    block: Block | str | Sequence[int | None] | None = None,
    estimate: Estimate | None = None,
    network: nn.Module | None = None,
    receipt: AnyReceipt | None = None,
) -> View:
    """Gathers what is known about a model.

    ``estimate`` holds its cycles on an NPU. ``network`` is the module that a file belongs to; it says which layers are
    transposed or grouped. ``receipt`` belongs to the weights, as for :func:`smartprune.report`.
    """
    stored = read_stored(model, network, block, receipt)
    slices = cut_source(stored.source, block)
    report, known = report_of(stored, slices), stored.receipt
    folder = Path(model) if isinstance(model, (str, os.PathLike)) and Path(model).is_dir() else None
    log = read_run_log(folder) if folder is not None and (folder / CONFIG).exists() else None
    scores = None if folder is None or known is None else read_scores(folder, known.blocks.total)
    layers = _layer_views(slices, report, known, scores, estimate)
    sizes = None if report.problems else _file_sizes(model, slices.block, network, stored.matching)
    title = folder.resolve().name if folder is not None else Path(stored.source.where).name
    nonfinite = tuple(cut.weight for cut in slices.cuts if not is_finite(cut.tensor))
    return View(title, report, layers, known, log, sizes, estimate, nonfinite)


def _layer_views(
    slices: Slices, report: Report, receipt: Receipt | None, scores: Array | None, estimate: Estimate | None
) -> tuple[LayerView, ...]:
    """The layers in network order if an estimate gives it; else the layers of the receipt first, then the others."""
    cuts = {cut.weight: (cut, row) for cut, row in zip(slices.cuts, report.layers, strict=True)}
    receipt_rows = _rows_with_scores(receipt, scores)
    cycles = {} if estimate is None else {layer.weight: (layer.dense.latency, layer.pruned.latency) for layer in estimate.layers}
    layers = []
    names = {plain_name(weight): weight for weight in cuts}
    listed = [names[name] for name in receipt_rows if name in names]
    for weight in dict.fromkeys([*cycles, *listed, *cuts]):
        if weight not in cuts:
            continue
        cut, row = cuts[weight]
        receipt_row, layer_scores = receipt_rows.get(plain_name(weight), (None, None))
        layers.append(
            LayerView(
                row=row,
                pruned=receipt_row is not None,
                macs=None if receipt_row is None else receipt_row.macs,
                cycles=cycles.get(weight),
                axes=cut.grid.axes,
                kept=row.kept.numpy(),
                norms=_norms(cut),
                scores=layer_scores,
            )
        )
    return tuple(layers)


def _rows_with_scores(receipt: Receipt | None, scores: Array | None) -> Mapping[str, tuple[Row, Array | None]]:
    """The rows of the receipt by weight, each with the scores of its blocks."""
    rows, start = {}, 0
    for row in receipt.layers if receipt is not None else ():
        rows[plain_name(row.weight)] = (row, None if scores is None else scores[start : start + row.blocks.total])
        start += row.blocks.total
    return rows


def to_panels(values: Array, row: ReportRow) -> Array:
    """One value per block, [n], as [kernel positions, output blocks, input blocks]."""
    outs, ins = (1, 0) if row.transposed else (0, 1)
    grid = np.moveaxis(values.reshape(row.grid), (outs, ins), (-2, -1))
    return grid.reshape(-1, row.grid[outs], row.grid[ins])


def _norms(cut: Cut) -> Array:
    weight: Tensor = comparable(cut.tensor).cpu().double()
    return cut.grid.sum(weight * weight).sqrt().float().numpy()


def _file_sizes(model: Model, block: Block, network: nn.Module | None, receipt: Receipt | None) -> tuple[int, int] | None:
    """Bytes of the tensors in a plain file and in a packed file; None for weights that cannot be packed."""
    try:
        return packed_sizes(model, block, network, receipt)
    except SmartpruneError:
        return None
