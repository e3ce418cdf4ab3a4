"""Reports on pruned models: tables, figures and HTML pages."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..artifacts.receipt import AnyReceipt
from ..artifacts.source import Model, stored_and_network
from ..core.block import Block
from ..files import check_writable
from .page import write_page
from .stored import read_stored
from .table import Report, ReportRow, cut_source, report_of

__all__ = ["Report", "ReportRow", "report"]


def report(
    stored: Model | None = None,
    /,
    block: Block | str | Sequence[int | None] | None = None,
    *,
    model: Model | None = None,
    receipt: AnyReceipt | None = None,
    html: str | os.PathLike[str] | None = None,
) -> Report:
    """Counts the zero blocks of every layer of a model, state dict, file or run folder, and writes a page about them.

    The sparsity comes from the receipt: the share of blocks removed, of the blocks of the pruned layers. Without a receipt it is
    not known which layers were pruned, and the zero blocks of all layers are counted.

    Args:
        stored: Anything that :func:`smartprune.verify` reads.
        block: The size of a block. Defaults to the block of the receipt or of the packed file, or else to 16x8.
        model: The ``torch.nn.Module`` that a state dict or a file belongs to. It says which layers are transposed or grouped.
            Without it and without a receipt, axes are read as (out, in, ...), and ``assumed`` of the result names those weights.
        receipt: A receipt, its JSON data or its path; it must match the weights. By default the receipt in the file or folder, or
            a ``receipt.json`` next to the file, or without ``block`` the receipt of a model that this process pruned, if the
            weights match it.
        html: A file for the whole report as a page with the layers, a map of the blocks and the receipt. It needs no network.

    Returns:
        The report. ``print`` shows it, and its ``map(layer)`` draws the blocks of a layer.

    Raises:
        SmartpruneError: The weights or the receipt cannot be read, no weight can be divided into blocks, or ``html`` cannot be
            written.

    Examples:
        >>> import smartprune as sp
        >>> import torch
        >>> weight = torch.zeros(4, 6)
        >>> weight[:2, 2:] = 1
        >>> result = sp.report({"fc.weight": weight}, block=(2, 2))
        >>> result.blocks.kept, result.blocks.total
        (2, 6)
        >>> print(result.map("fc", ascii_only=True))
        fc: 2 of 6 blocks of 2x2x1x1 kept; # kept, . zero
        <BLANKLINE>
        .##
        ...
    """
    weights, network = stored_and_network(stored, model, "report")
    loaded = read_stored(weights, network, block, receipt)
    result = report_of(loaded, cut_source(loaded.source, block))
    if html is not None:
        check_writable(html)
        write_page(os.fspath(html), weights, block, network=network, receipt=receipt)
    return result
