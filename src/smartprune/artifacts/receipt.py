"""Receipts: what was requested and what was achieved, in integers, with a map of the kept blocks and its hash."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from weakref import WeakKeyDictionary

from torch import Tensor, cat, nn

from .. import text
from ..budgets import removal
from ..core.block import Block
from ..core.layers import unwrapped
from ..core.macs import COUNTED
from ..core.occupancy import map_hash
from ..errors import SmartpruneError
from ..fields import Fields, plain_data
from ..files import parse_json, read_limited, write_atomic
from .counts import Count, Requested, Row, sparsity_line

FORMAT = 1
WIDTH = 80
MAX_BYTES = 1 << 25
MAX_LAYERS = 100_000
MAX_NAMES = 1000


@dataclass(frozen=True)
class Receipt:
    """What was requested and what pruning achieved. :func:`smartprune.bake` returns it, and :func:`smartprune.verify` checks it.

    Attributes:
        version: The version of smartprune.
        method: The name of the method.
        settings: The settings of the method.
        block: The size of a block.
        floor: The smallest share of its blocks that every layer keeps, or None.
        requested: The budget, and how much of it is used. None if there was no budget.
        layers: A row per pruned layer.
        model_weights: Weights of the whole model.
        model_macs: MACs of the whole model for one sample, or None.
        mask_hash: The hash of the kept blocks.
        not_counted: Operators that ran and whose MACs are not known. None if MACs were not counted.
        not_pruned: Names of layers that were left out because of what inference does with them, with the reason.

    Examples:
        >>> import smartprune as sp
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.75, steps=1)
        >>> pruner.freeze()
        >>> receipt = sp.bake(model)
        >>> receipt.sparsity, receipt.blocks.kept, receipt.met
        (0.75, 1, True)
    """

    version: str
    method: str
    settings: Mapping[str, object]
    block: Block
    floor: Fraction | None
    requested: Requested | None
    layers: tuple[Row, ...]
    model_weights: Count
    model_macs: Count | None
    mask_hash: str
    not_counted: tuple[str, ...] | None = None
    not_pruned: tuple[tuple[str, str], ...] = ()  # layers left out because of what inference does with them: name, reason

    @property
    def blocks(self) -> Count:
        """Blocks of the pruned layers."""
        return Count.sum([row.blocks for row in self.layers])

    @property
    def weights(self) -> Count:
        """Weights of the pruned layers."""
        return Count.sum([row.weights for row in self.layers])

    @property
    def macs(self) -> Count | None:
        """MACs of the pruned layers for one sample; None where unknown."""
        known = [row.macs for row in self.layers if row.macs is not None]
        return Count.sum(known) if len(known) == len(self.layers) else None

    @property
    def kept_but_zero(self) -> int:
        """Blocks that the mask keeps although all their weights are zero."""
        return sum(row.blocks.kept - row.occupied for row in self.layers)

    @property
    def sparsity(self) -> float:
        """Share of blocks removed, of the blocks of the pruned layers."""
        return self.blocks.removed / self.blocks.total

    @property
    def met(self) -> bool:
        """Whether the budget is met; true if there was none."""
        return self.requested is None or self.requested.met

    def mask(self) -> Tensor:
        """The kept blocks of all layers.

        Returns:
            A bool tensor [N].
        """
        return cat([row.mask() for row in self.layers])

    def to_json(self) -> dict[str, object]:
        """The receipt as plain data, as stored in ``receipt.json``.

        Returns:
            A dictionary of numbers, strings, lists and dictionaries.
        """
        requested = self.requested
        return {
            "format": FORMAT,
            "smartprune": self.version,
            "method": self.method,
            "settings": plain_settings(self.settings, "receipt: settings"),
            "block": str(self.block),
            "floor": None if self.floor is None else {"share": str(self.floor), "value": float(self.floor)},
            "asked": None if requested is None else requested.to_json(),
            "achieved": {
                "used": None if requested is None else requested.used,
                "met": self.met,
                "blocks": self.blocks.to_json(),
                "weights": self.weights.to_json(),
                "macs": None if self.macs is None else self.macs.to_json(),
                "model_weights": self.model_weights.to_json(),
                "model_macs": None if self.model_macs is None else self.model_macs.to_json(),
                "kept_but_zero": self.kept_but_zero,
                "not_counted": None if self.not_counted is None else list(self.not_counted),
            },
            "mask_hash": self.mask_hash,
            "not_pruned": [{"name": name, "reason": reason} for name, reason in self.not_pruned],
            "layers": [row.to_json() for row in self.layers],
        }

    @staticmethod
    def from_json(data: object, where: str = "receipt") -> Receipt:
        """Reads plain data that is not trusted: every type, range and sum is checked.

        Args:
            data: What :meth:`to_json` returned.
            where: The name of the source, for messages.

        Returns:
            The receipt.

        Raises:
            SmartpruneError: The data is incomplete or inconsistent.
        """
        return _read(Fields(data, where))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the receipt as JSON. A crash leaves the old file or the new one, never a part of one.

        Args:
            path: The file.
        """
        data = self.to_json()
        rows = ",\n".join(f"  {json.dumps(row.to_json())}" for row in self.layers)
        lines = [f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in data.items() if key != "layers"]
        lines.append(f'"layers": [\n{rows}\n]')
        write_atomic(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Receipt:
        """Reads a receipt from a JSON file.

        Args:
            path: The file.

        Returns:
            The receipt.

        Raises:
            SmartpruneError: The file is missing, incomplete or inconsistent.
        """
        where = os.fspath(path)
        return Receipt.from_json(parse_json(read_limited(path, MAX_BYTES), where), where)

    def __repr__(self) -> str:
        layers = text.counted(len(self.layers), "layer")
        return f"<Receipt: {self.method}, blocks of {self.block}, {layers}, {sparsity_line(self.blocks)}>"

    def __str__(self) -> str:
        floor = f", floor {float(self.floor):g}" if self.floor is not None else ""
        return "\n".join(
            [
                f"{self.method}, blocks of {self.block}{floor}",
                "",
                *self._layer_lines(),
                "",
                *self._total_lines(),
                "",
                sparsity_line(self.blocks),
                *self._budget_lines(),
                *self._note_lines(),
                f"mask     {self.mask_hash}",
            ]
        )

    def _layer_lines(self) -> list[str]:
        ascii_only = text.stdout_is_ascii()
        rows = [
            (
                row.name,
                text.format_shape(row.shape),
                f"{row.blocks.kept:,}/{row.blocks.total:,}",
                text.bar(row.blocks.kept, row.blocks.total, 14, ascii_only),
                text.percent(row.blocks.removed, row.blocks.total),
            )
            for row in self.layers
        ]
        return text.table(("layer", "weight", "kept/blocks", "kept", "sparsity"), rows, "<<><>", WIDTH, (0, 1))

    def _total_lines(self) -> list[str]:
        totals = {
            "blocks of the pruned layers": self.blocks,
            "weights of the pruned layers": self.weights,
            "weights of the model": self.model_weights,
            "MACs of the pruned layers": self.macs,
            "MACs of the model": self.model_macs,
        }
        rows = [
            (name, f"{count.total:,}", f"{count.kept:,}", f"{count.removed:,}", count.percent)
            for name, count in totals.items()
            if count is not None
        ]
        return text.table(("", "total", "kept", "removed", "share"), rows, "<>>>>", WIDTH)

    def _budget_lines(self) -> list[str]:
        if self.requested is None:
            return []
        limit, total = self.requested.limit, self.requested.total
        wanted = removal(float(self.requested.share), self.requested.label, self.requested.of)
        unmet = "" if self.met else ", budget NOT met"
        lines = [
            f"budget   {wanted}: keep {self.requested.bound} {limit:,} of {total:,}",
            f"kept     {self.requested.used:,} {self.requested.unit}{unmet}",
        ]
        if self.requested.npu is not None:
            lines += _wrapped("npu", ", ".join(f"{name}={value}" for name, value in self.requested.npu.items()))
        if self.requested.table is not None:
            lines += _wrapped("costs", ", ".join(f"{name} {value}" for name, value in self.requested.table.items()))
        return lines

    def _note_lines(self) -> list[str]:
        lines = [f"note     {self.kept_but_zero:,} kept blocks hold only zeros"] if self.kept_but_zero else []
        if self.model_macs is not None and self.not_counted is not None:
            missing = f"; not counted in {', '.join(self.not_counted)}" if self.not_counted else ""
            lines += _wrapped("note", f"MACs of the model are counted in {COUNTED}{missing}")
        empty = [row.name for row in self.layers if row.blocks.total and not row.blocks.kept]
        if empty:
            names = text.some_names(empty)
            lines += _wrapped(
                "note",
                f"no block is kept in {len(empty)} of {len(self.layers)} layers, which pass nothing on "
                f"(floor=0.01 prevents this): {names}",
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.not_pruned:
            reasons.setdefault(reason, []).append(name)
        for reason, left in reasons.items():
            lines += _wrapped("note", f"not pruned: {text.some_names(left)} ({reason})")
        return lines


AnyReceipt = Receipt | Mapping[str, object] | str | os.PathLike[str]


def as_receipt(receipt: AnyReceipt, where: str) -> Receipt:
    """A receipt from a Receipt, its JSON data or its path."""
    if isinstance(receipt, Receipt):
        return receipt
    if isinstance(receipt, (str, os.PathLike)):
        return Receipt.load(receipt)
    if isinstance(receipt, Mapping):
        return Receipt.from_json(dict(receipt))
    raise SmartpruneError(f"{where}: receipt is a {type(receipt).__name__}; give a Receipt, its JSON data or its path")


def _wrapped(label: str, value: str) -> list[str]:
    return textwrap.wrap(value, WIDTH, initial_indent=f"{label:<9}", subsequent_indent=" " * 9, break_on_hyphens=False)


def _read(fields: Fields) -> Receipt:
    if fields.raw("format") != FORMAT:
        raise fields.error("format", f"{FORMAT}; a newer smartprune may read it")
    try:
        block = Block.of(fields.text("block", max_length=100))
    except SmartpruneError as error:
        raise SmartpruneError(f"{fields.where}: {error}") from None
    layers = tuple(Row.read(item, block) for item in fields.items("layers", MAX_LAYERS))
    names = [row.weight for row in layers]
    if not layers or len(set(names)) != len(names):
        raise fields.error("layers", "at least one layer, and no weight twice")
    floor, request, achieved = fields.optional("floor"), fields.optional("asked"), fields.nested("achieved")
    used = None if request is None else achieved.integer("used")
    blocks, weights = Count.sum([row.blocks for row in layers]), Count.sum([row.weights for row in layers])
    model_macs = achieved.optional("model_macs")
    not_counted = None if achieved.raw("not_counted") is None else achieved.texts("not_counted", MAX_NAMES)
    not_pruned = fields.items("not_pruned", MAX_LAYERS)
    receipt = Receipt(
        version=fields.text("smartprune", max_length=100),
        method=fields.text("method", max_length=100),
        settings=plain_settings(fields.raw("settings"), f"{fields.where}: settings"),
        block=block,
        floor=None if floor is None else floor.share(),
        requested=None if request is None or used is None else Requested.read(request, used, blocks, weights),
        layers=layers,
        model_weights=Count.read(achieved.nested("model_weights")),
        model_macs=None if model_macs is None else Count.read(model_macs),
        not_counted=not_counted,
        not_pruned=tuple((item.text("name"), item.text("reason")) for item in not_pruned),
        mask_hash=fields.match("mask_hash", "sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits"),
    )
    for item in not_pruned:
        item.reject_unknown_keys()
    fields.reject_unknown_keys()
    _check_sums(receipt, fields)
    return receipt


def _check_sums(receipt: Receipt, fields: Fields) -> None:
    """Raises unless everything in the file follows from its layers."""
    data, weights = receipt.to_json(), receipt.weights
    wrong = [key for key in data if json.dumps(data[key], sort_keys=True) != json.dumps(fields.data[key], sort_keys=True)]
    if wrong:  # as texts, because 1 == True
        raise SmartpruneError(f"{fields.where}: {', '.join(wrong)} does not agree with the layers")
    if receipt.model_weights.removed != weights.removed or receipt.model_weights.total < weights.total:
        raise SmartpruneError(f"{fields.where}: model_weights does not agree with the layers")
    maps = ((row.weight, row.grid, row.mask()) for row in receipt.layers)
    if receipt.kept_but_zero == 0 and receipt.mask_hash != map_hash(receipt.block, maps):
        raise SmartpruneError(f"{fields.where}: mask_hash is not the hash of the maps; the file was changed after it was written")


_receipts: WeakKeyDictionary[nn.Module, Receipt] = WeakKeyDictionary()


def remember_receipt(model: nn.Module, receipt: Receipt) -> None:
    """Lets :func:`receipt_of` find the receipt as long as the model exists."""
    _receipts[unwrapped(model)] = receipt


def receipt_of(model: nn.Module) -> Receipt | None:
    """The receipt of a model that this process has pruned. Its weights may have changed since."""
    return _receipts.get(unwrapped(model))


def plain_settings(value: object, where: str) -> dict[str, object]:
    """A copy of settings as plain data."""
    settings = plain_data(value, where)
    if not isinstance(settings, dict):
        raise SmartpruneError(f"{where} must be a dictionary")
    return settings
