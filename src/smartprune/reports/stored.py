"""The stored weights of a model with their receipt: one that was given, one inside or next to a file, or of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ..artifacts.receipt import AnyReceipt, Receipt, as_receipt, receipt_of
from ..artifacts.source import Model, Source, read_source
from ..artifacts.verify import NOT_FINITE, compare_with_receipt
from ..core.block import Block
from ..errors import SmartpruneError
from ..run_files import RECEIPT


@dataclass(frozen=True)
class Stored:
    """Weights and their receipt.

    ``problems`` lists differences between the weights and the receipt of their folder or file; its counts are not used then.
    ``note`` says why a receipt that was found is not used.
    """

    source: Source
    receipt: Receipt | None = None
    problems: tuple[str, ...] = ()
    note: str = ""

    @property
    def matching(self) -> Receipt | None:
        """The receipt, if the weights match it."""
        return None if self.problems else self.receipt


def read_stored(
    stored: Model,
    network: nn.Module | None = None,
    block: Block | str | Sequence[int | None] | None = None,
    receipt: AnyReceipt | None = None,
) -> Stored:
    """Reads weights and looks for their receipt. A receipt that is given must match the weights; otherwise this raises.

    ``network`` is the module of the weights, ``block`` the block to count instead of the block of the receipt.
    """
    source = read_source(stored, network)
    wanted = None if block is None else Block.of(block)
    if receipt is not None:
        return _with_given(source, as_receipt(receipt, "report"), wanted)
    if source.receipt is not None:
        if wanted is not None and wanted != source.receipt.block:
            return Stored(source, note=f"the receipt counts blocks of {source.receipt.block}, so its sparsity is not shown")
        return Stored(source, source.receipt, _differences(source, source.receipt))
    path = find_receipt(stored)
    if path is not None:
        return _with_found(source, path, wanted)
    known = receipt_of(stored) if wanted is None and isinstance(stored, nn.Module) else None
    return Stored(source) if known is None else _if_matching(source, known, wanted, "the receipt of this model")


def find_receipt(stored: object) -> Path | None:
    """The receipt next to a file, if there is one."""
    if not isinstance(stored, (str, os.PathLike)) or os.path.isdir(stored):
        return None
    path = Path(stored).parent / RECEIPT
    return path if path.is_file() else None


def _with_given(source: Source, receipt: Receipt, wanted: Block | None) -> Stored:
    if wanted is not None and wanted != receipt.block:
        raise SmartpruneError(
            f"report: blocks of {wanted} were requested, and the receipt counts blocks of {receipt.block}; leave one of the two out"
        )
    if problems := _differences(source, receipt):
        raise SmartpruneError(
            f"report: {source.where} does not match the receipt: {summarize(problems)}; give the receipt of these weights, or none"
        )
    return Stored(replace(source, receipt=receipt), receipt)


def _with_found(source: Source, path: Path, wanted: Block | None) -> Stored:
    """A receipt next to a file may belong to another file, so it is used only if the weights match it."""
    try:
        receipt = Receipt.load(path)
    except SmartpruneError as error:
        return Stored(source, note=f"{path.name} next to the file cannot be used ({error})")
    return _if_matching(source, receipt, wanted, path.name, " next to the file")


def _if_matching(source: Source, receipt: Receipt, wanted: Block | None, name: str, place: str = "") -> Stored:
    """The source with a receipt that was found. Notes call it ``name``."""
    if problems := _differences(source, receipt):
        return Stored(source, note=f"{name}{place} is not used, because the weights do not match it ({problems[0]})")
    source = replace(source, receipt=receipt)  # also for other blocks, because it gives the axes
    if wanted is not None and wanted != receipt.block:
        return Stored(source, note=f"{name} counts blocks of {receipt.block}, so its sparsity is not shown")
    return Stored(source, receipt)


def summarize(problems: Sequence[str]) -> str:
    """The first problem, and how many more there are."""
    more = len(problems) - 1
    return problems[0] + (f" (and {more} more problem{'' if more == 1 else 's'}; smartprune verify lists them)" if more else "")


def _differences(source: Source, receipt: Receipt) -> tuple[str, ...]:
    """Differences between weights and receipt. NaN and infinity are left out, because they are reported with or without a
    receipt."""
    return tuple(p for p in compare_with_receipt(source, receipt).problems if not p.endswith(NOT_FINITE))
