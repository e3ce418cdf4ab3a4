"""Receipts: what was asked and what was achieved, integer by integer, with a map of the kept blocks and its hash."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from typing import TYPE_CHECKING

from torch import Tensor, cat

from .. import text
from ..core.block import Block
from ..core.occupancy import map_hash
from ..errors import SmartpruneError
from ..fields import Fields, plain_data
from ..files import parse_json, read_limited, write_atomic
from .counts import Asked, Count, Row

if TYPE_CHECKING:
    pass

FORMAT = 1
WIDTH = 80
MOST_BYTES = 1 << 25
MOST_LAYERS = 100_000


@dataclass(frozen=True)
class Receipt:
    """What a bake did. Made by :func:`make_receipt`, checked against tensors by :func:`smartprune.verify`."""

    version: str
    method: str
    settings: Mapping[str, object]
    block: Block
    floor: Fraction | None
    asked: Asked | None
    layers: tuple[Row, ...]
    model_weights: Count
    model_macs: Count | None
    mask_hash: str

    @property
    def blocks(self) -> Count:
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
        """Blocks that the mask keeps and whose weights are all zero by themselves."""
        return sum(row.blocks.kept - row.occupied for row in self.layers)

    @property
    def sparsity(self) -> float:
        """Share of blocks removed."""
        return self.blocks.removed / self.blocks.total

    @property
    def met(self) -> bool:
        """Whether the mask keeps what was asked; true where nothing was."""
        return self.asked is None or self.asked.met

    def mask(self) -> Tensor:
        """The kept blocks of all layers, bool [N]."""
        return cat([row.mask() for row in self.layers])

    def to_json(self) -> dict[str, object]:
        """Plain data, as stored in ``receipt.json``."""
        asked = self.asked
        return {
            "format": FORMAT,
            "smartprune": self.version,
            "method": self.method,
            "settings": _settings(self.settings, "receipt: settings"),
            "block": str(self.block),
            "floor": None if self.floor is None else {"share": str(self.floor), "value": float(self.floor)},
            "asked": None if asked is None else asked.to_json(),
            "achieved": {
                "used": None if asked is None else asked.used,
                "met": self.met,
                "blocks": self.blocks.to_json(),
                "weights": self.weights.to_json(),
                "macs": None if self.macs is None else self.macs.to_json(),
                "model_weights": self.model_weights.to_json(),
                "model_macs": None if self.model_macs is None else self.model_macs.to_json(),
                "kept_but_zero": self.kept_but_zero,
            },
            "mask_hash": self.mask_hash,
            "layers": [row.to_json() for row in self.layers],
        }

    @staticmethod
    def from_json(data: object, where: str = "receipt") -> Receipt:
        """Reads plain data that nobody vouches for: every type, range and sum is checked."""
        return _read(Fields(data, where))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON; a crash leaves the old file or the new one, never a part."""
        data = self.to_json()
        rows = ",\n".join(f"  {json.dumps(row.to_json())}" for row in self.layers)
        lines = [f'"{key}": {json.dumps(value, allow_nan=False)}' for key, value in data.items() if key != "layers"]
        lines.append(f'"layers": [\n{rows}\n]')
        write_atomic(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Receipt:
        where = os.fspath(path)
        return Receipt.from_json(parse_json(read_limited(path, MOST_BYTES), where), where)

    def __str__(self) -> str:
        plain_bars = text.stdout_is_ascii()
        rows = [
            (
                row.name,
                text.format_shape(row.shape),
                f"{row.blocks.kept:,}/{row.blocks.total:,}",
                text.bar(row.blocks.kept, row.blocks.total, 14, plain_bars),
                text.percent(row.blocks.removed, row.blocks.total),
            )
            for row in self.layers
        ]
        totals = [
            ("blocks", self.blocks),
            ("weights, pruned layers", self.weights),
            ("weights, model", self.model_weights),
        ]
        if self.macs is not None:
            totals.append(("MACs, pruned layers", self.macs))
        if self.model_macs is not None:
            totals.append(("MACs, model", self.model_macs))
        counts = [(name, f"{c.total:,}", f"{c.kept:,}", f"{c.removed:,}", text.percent(c.removed, c.total)) for name, c in totals]
        lines = [
            f"{self.method}, blocks of {self.block}" + (f", floor {float(self.floor):g}" if self.floor is not None else ""),
            "",
            *text.table(("layer", "weight", "kept/blocks", "kept", "sparsity"), rows, "<<><>", WIDTH, (0, 1)),
            "",
            *text.table(("", "total", "kept", "removed", "share"), counts, "<>>>>", WIDTH),
            "",
        ]
        if self.asked is not None:
            bound = "exactly" if self.asked.kind == "blocks" else "at most"
            lines += [
                f"asked    {self.asked.kind} {float(self.asked.share):g} removed: "
                f"keep {bound} {self.asked.limit:,} of {self.asked.total:,}",
                f"achieved {self.asked.used:,} kept" + ("" if self.met else ": NOT what was asked"),
            ]
            if self.asked.npu is not None:
                lines.append(f"npu      {self.asked.npu}")
        if self.kept_but_zero:
            lines.append(f"note     {self.kept_but_zero:,} kept blocks are zero by themselves")
        if empty := [row.name for row in self.layers if row.blocks.total and not row.blocks.kept]:
            names = ", ".join(empty[:3]) + (f" and {len(empty) - 3} more" if len(empty) > 3 else "")
            told = f"{len(empty)} of {len(self.layers)} layers keep no block and pass nothing on (floor=0.01 forbids it): {names}"
            lines += textwrap.wrap(told, WIDTH, initial_indent="note     ", subsequent_indent=" " * 9, break_on_hyphens=False)
        return "\n".join([*lines, f"mask     {self.mask_hash}"])


def _read(fields: Fields) -> Receipt:
    made = fields.raw("format")
    if made != FORMAT:
        raise fields.error("format", f"{FORMAT}; a newer smartprune may read it")
    try:
        block = Block.of(fields.text("block", max_length=100))
    except SmartpruneError as error:
        raise SmartpruneError(f"{fields.where}: {error}") from None
    layers = tuple(Row.read(item, block) for item in fields.items("layers", MOST_LAYERS))
    names = [row.weight for row in layers]
    if not layers or len(set(names)) != len(names):
        raise fields.error("layers", "at least one layer, and no weight twice")
    floor, asked, done = fields.optional("floor"), fields.optional("asked"), fields.nested("achieved")
    used = None if asked is None else done.integer("used")
    blocks, weights = Count.sum([row.blocks for row in layers]), Count.sum([row.weights for row in layers])
    model_macs = done.optional("model_macs")
    out = Receipt(
        version=fields.text("smartprune", max_length=100),
        method=fields.text("method", max_length=100),
        settings=_settings(fields.raw("settings"), f"{fields.where}: settings"),
        block=block,
        floor=None if floor is None else floor.share(),
        asked=None if asked is None or used is None else Asked.read(asked, used, blocks, weights),
        layers=layers,
        model_weights=Count.read(done.nested("model_weights")),
        model_macs=None if model_macs is None else Count.read(model_macs),
        mask_hash=fields.match("mask_hash", "sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits"),
    )
    fields.reject_unknown_keys()
    again = out.to_json()
    wrong = [key for key in again if json.dumps(again[key], sort_keys=True) != json.dumps(fields.data[key], sort_keys=True)]
    if wrong:  # sums, and values that are equal but of another type, such as 1 for true
        raise SmartpruneError(f"{fields.where}: {', '.join(wrong)} does not agree with the layers")
    if out.model_weights.removed != weights.removed or out.model_weights.total < weights.total:
        raise SmartpruneError(f"{fields.where}: model_weights does not agree with the layers")
    if out.kept_but_zero == 0 and out.mask_hash != map_hash(block, ((r.weight, r.grid, r.mask()) for r in layers)):
        raise SmartpruneError(f"{fields.where}: mask_hash is not the hash of the maps; the file was changed after it was made")
    return out


def _settings(value: object, where: str) -> dict[str, object]:
    out = plain_data(value, where)
    if not isinstance(out, dict):
        raise SmartpruneError(f"{where} must be a dictionary")
    return out


def _version() -> str:
    try:
        return metadata.version("smartprune")
    except metadata.PackageNotFoundError:
        return "not installed"
