"""The parts of a receipt: integer counts, the requested budget, and one row per layer. Reading checks every value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

from .. import text
from ..budgets import budget_label, budget_unit, table_unit
from ..core.block import Block, Grid
from ..core.budget import BlockBudget, ParamBudget, keep_count
from ..core.occupancy import unpack_bits
from ..errors import SmartpruneError
from ..fields import MAX_INTEGER, Fields, is_valid_name

MAX_AXES = 8
MAX_FIELDS = 32


@dataclass(frozen=True)
class Count:
    """A total, and the part of it in kept blocks."""

    total: int
    kept: int

    @property
    def removed(self) -> int:
        return self.total - self.kept

    @staticmethod
    def sum(counts: Sequence[Count]) -> Count:
        return Count(sum(c.total for c in counts), sum(c.kept for c in counts))

    @property
    def percent(self) -> str:
        """The removed share, such as ``80.00%``."""
        return text.percent(self.removed, self.total)

    def to_json(self) -> dict[str, object]:
        return {"total": self.total, "kept": self.kept, "removed": self.removed}

    @staticmethod
    def read(fields: Fields) -> Count:
        total = fields.integer("total")
        out = Count(total, fields.integer("kept", 0, total))
        fields.integer("removed", out.removed, out.removed)
        fields.reject_unknown_keys()
        return out

    @staticmethod
    def expect(fields: Fields, count: Count | None) -> None:
        """Raises if the stored count is not ``count``."""
        if fields.data != _json(count):
            raise SmartpruneError(f"{fields.where} does not add up: the layers say {_json(count)}")


def sparsity_line(blocks: Count) -> str:
    """The sparsity of the pruned layers, in the words that every receipt, report and export uses.

    >>> sparsity_line(Count(2608, 522))
    'sparsity 79.98%: 2,086 of 2,608 blocks of the pruned layers removed'
    """
    return f"sparsity {blocks.percent}: {removed_blocks(blocks)}"


def removed_blocks(blocks: Count) -> str:
    return f"{blocks.removed:,} of {blocks.total:,} blocks of the pruned layers removed"


@dataclass(frozen=True)
class Requested:
    """The budget: the share to remove, the limit that follows from it, and what the kept blocks cost (``used``).

    ``npu`` holds the fields of the :class:`smartprune.NPU` whose cycles were counted. Here they are plain data;
    ``NPU.from_json`` checks them. ``table`` says where measured costs come from: their name, unit, resolution and digest.
    """

    kind: str
    share: Fraction
    of: str
    limit: int
    total: int
    used: int
    npu: Mapping[str, object] | None = None
    table: Mapping[str, object] | None = None

    @property
    def label(self) -> str:
        """What the share is a share of."""
        return budget_label(self.kind) if self.table is None else str(self.table["name"])

    @property
    def unit(self) -> str:
        """What is counted, such as ``MACs``, ``pJ`` or ``units of 0.1 pJ``."""
        return budget_unit(self.kind) if self.table is None else table_unit(self.table)

    @property
    def is_exact(self) -> bool:
        """Whether the limit is met exactly, not only as an upper bound. This holds for budgets in blocks."""
        return self.kind == BlockBudget.kind

    @property
    def bound(self) -> str:
        return "exactly" if self.is_exact else "at most"

    @property
    def met(self) -> bool:
        return self.used == self.limit if self.is_exact else self.used <= self.limit

    def to_json(self) -> dict[str, object]:
        """Everything except ``used``, which belongs to what was achieved."""
        share = {"share": str(self.share), "value": float(self.share)}
        npu = {} if self.npu is None else {"npu": dict(self.npu)}
        table = {} if self.table is None else {"table": dict(self.table)}
        return {"kind": self.kind, **share, "of": self.of, "limit": self.limit, "total": self.total, **npu, **table}

    @staticmethod
    def read(fields: Fields, used: int, blocks: Count, weights: Count) -> Requested:
        """``blocks`` and ``weights`` are the sums over the layers, which the budget must agree with."""
        requested = Requested(
            kind=fields.match("kind", r"[a-z_]{1,32}", "a lower-case word such as 'blocks'"),
            share=fields.share(),
            of=fields.match("of", "layers|model", "'layers' or 'model'"),
            limit=fields.integer("limit"),
            total=fields.integer("total"),
            used=used,
            npu=_read_plain_fields(fields.nested("npu")) if "npu" in fields.data else None,
            table=_read_table(fields.nested("table")) if "table" in fields.data else None,
        )
        if fields.raw("value") != float(requested.share):
            raise fields.error("value", f"{float(requested.share)}, as share says")
        fields.reject_unknown_keys()
        kind, total = requested.kind, requested.total
        count = {BlockBudget.kind: blocks, ParamBudget.kind: weights}.get(kind, Count(total, used))
        if (total, used) != (count.total, count.kept) or used > total:
            raise SmartpruneError(
                f"{fields.where} does not add up: {used} of {total} {kind}, and the layers say {count.kept} of {count.total}"
            )
        limits = {
            BlockBudget.kind: keep_count(requested.share, total),
            ParamBudget.kind: math.floor((1 - requested.share) * total),
        }
        if requested.limit != limits.get(kind, requested.limit):
            raise fields.error("limit", f"{limits[kind]}, which follows from the share and the total")
        return requested


def _read_table(fields: Fields) -> dict[str, object]:
    for name in ("name", "unit"):
        fields.text(name, max_length=100)
    fields.match("resolution", r"[1-9]\d{0,29}(/[1-9]\d{0,29})?", "an exact number above 0, such as '1/1000'")
    fields.match("sha256", "[0-9a-f]{64}", "64 hexadecimal digits")
    return _read_plain_fields(fields)


def _read_plain_fields(fields: Fields) -> dict[str, object]:
    """Names with numbers, short texts or null. They are printed without being interpreted."""
    if len(fields.data) > MAX_FIELDS or not all(is_valid_name(name, 40) for name in fields.data):
        raise SmartpruneError(f"{fields.where} must have at most {MAX_FIELDS} fields with short names")
    for name, value in fields.data.items():
        if isinstance(value, str):
            fields.text(name, max_length=100)
        elif value is not None:
            fields.number(name)
    return dict(fields.data)


@dataclass(frozen=True)
class Row:
    """One pruned layer. ``map`` holds its kept blocks as packed bits; ``occupied`` counts those that are not all zeros."""

    name: str
    weight: str
    kind: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    parts: int
    transposed: bool
    blocks: Count
    occupied: int
    weights: Count
    macs: Count | None
    map: str = field(repr=False)

    def mask(self) -> Tensor:
        """The kept blocks, bool [n]."""
        return unpack_bits(self.map, self.blocks.total)

    def cut(self, block: Block) -> Grid:
        """The grid of the layer for another block."""
        return block.grid(self.shape, self.parts, self.transposed)

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {key: getattr(self, key) for key in ("name", "weight", "kind", "parts", "transposed", "map")}
        out |= {"shape": list(self.shape), "grid": list(self.grid), "weights": self.weights.to_json()}
        out |= {"blocks": self.blocks.to_json() | {"occupied": self.occupied}, "macs": _json(self.macs)}
        return out

    @staticmethod
    def read(fields: Fields, block: Block) -> Row:
        shape = fields.integers("shape", 1, MAX_AXES)
        if len(shape) < 2 or math.prod(shape) > MAX_INTEGER:
            raise fields.error("shape", f"the sizes of a weight with 2 to {MAX_AXES} axes")
        parts, transposed = fields.integer("parts", 1), fields.boolean("transposed")
        try:
            grid = block.grid(shape, parts, transposed)
        except SmartpruneError as error:
            raise SmartpruneError(f"{fields.where}: {error}") from None
        if fields.integers("grid", 1, MAX_AXES) != grid.shape:
            raise fields.error("grid", f"{list(grid.shape)}, which follows from shape and block")
        inner = fields.nested("blocks")
        occupied = inner.integer("occupied")
        blocks = Count.read(inner)
        packed = fields.text("map", max_length=4 * -(-grid.n // 24))
        try:
            kept = unpack_bits(packed, grid.n)
        except SmartpruneError as error:
            raise SmartpruneError(f"{fields.where}: map cannot be read: {error}") from None
        weights = Count(math.prod(shape), int(grid.sizes()[kept].sum()))
        if blocks != Count(grid.n, int(kept.sum())) or occupied > blocks.kept:
            raise SmartpruneError(f"{fields.where}: blocks does not add up with shape, block and map")
        Count.expect(fields.nested("weights"), weights)
        macs = fields.optional("macs")
        out = Row(
            name=fields.text("name"),
            weight=fields.text("weight"),
            kind=fields.text("kind"),
            shape=shape,
            grid=grid.shape,
            parts=parts,
            transposed=transposed,
            blocks=blocks,
            occupied=occupied,
            weights=weights,
            macs=None if macs is None else Count.read(macs),
            map=packed,
        )
        fields.reject_unknown_keys()
        return out


def _json(count: Count | None) -> dict[str, object] | None:
    return None if count is None else count.to_json()
