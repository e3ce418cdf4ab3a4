"""Tallies: the parts of a receipt, counted in integers, and how they are read back without trust."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.block import Block, Grid
from ..core.budget import keep_count
from ..core.occupancy import unpack_bits
from ..errors import SmartpruneError
from ..fields import MAX_INTEGER, Fields

if TYPE_CHECKING:
    from ..hardware.npu import NPU

MOST_AXES = 8


@dataclass(frozen=True)
class Count:
    """So many in all, so many of them in blocks that are kept."""

    total: int
    kept: int

    @property
    def removed(self) -> int:
        return self.total - self.kept

    @staticmethod
    def sum(counts: Sequence[Count]) -> Count:
        return Count(sum(c.total for c in counts), sum(c.kept for c in counts))

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
        """Refuses a sum that is not the sum of its parts."""
        if fields.data != _json(count):
            raise SmartpruneError(f"{fields.where} does not add up: the layers say {_json(count)}")


@dataclass(frozen=True)
class Asked:
    """The budget: the share to remove, the limit that follows from it, and what the kept blocks cost (``used``). ``npu`` is the
    machine whose cycles were counted."""

    kind: str
    share: Fraction
    of: str
    limit: int
    total: int
    used: int
    npu: NPU | None = None

    @property
    def met(self) -> bool:
        return self.used == self.limit if self.kind == "blocks" else self.used <= self.limit

    def to_json(self) -> dict[str, object]:
        """All but ``used``, which is no part of what was asked."""
        share = {"share": str(self.share), "value": float(self.share)}
        machine = {} if self.npu is None else {"npu": self.npu.to_json()}
        return {"kind": self.kind, **share, "of": self.of, "limit": self.limit, "total": self.total, **machine}

    @staticmethod
    def read(fields: Fields, used: int, blocks: Count, weights: Count) -> Asked:
        """``blocks`` and ``weights`` are the sums over the layers, with which the budget must agree."""
        out = Asked(
            kind=fields.match("kind", r"[a-z_]{1,32}", "a lower-case word such as 'blocks'"),
            share=fields.share(),
            of=fields.match("of", "layers|model", "'layers' or 'model'"),
            limit=fields.integer("limit"),
            total=fields.integer("total"),
            used=used,
            npu=_machine(fields) if "npu" in fields.data else None,
        )
        if fields.raw("value") != float(out.share):
            raise fields.error("value", f"{float(out.share)}, as share says")
        fields.reject_unknown_keys()
        count = {"blocks": blocks, "params": weights}.get(out.kind, Count(out.total, used))
        if (out.total, used) != (count.total, count.kept) or used > out.total:
            raise SmartpruneError(
                f"{fields.where} does not add up: {used} of {out.total} {out.kind}, "
                f"and the layers say {count.kept} of {count.total}"
            )
        limit = {"blocks": keep_count(out.share, out.total), "params": math.floor((1 - out.share) * out.total)}
        if out.limit != limit.get(out.kind, out.limit):
            raise fields.error("limit", f"{limit[out.kind]}, which follows from the share and the total")
        return out


def _machine(fields: Fields) -> NPU:
    from ..hardware.npu import NPU

    return NPU.from_json(fields.raw("npu"), f"{fields.where}: npu")


@dataclass(frozen=True)
class Row:
    """One pruned layer. ``map`` are its kept blocks as packed bits, ``occupied`` counts those that are not zero."""

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
        return block.grid(self.shape, self.parts, self.transposed)

    def to_json(self) -> dict[str, object]:
        out: dict[str, object] = {key: getattr(self, key) for key in ("name", "weight", "kind", "parts", "transposed", "map")}
        out |= {"shape": list(self.shape), "grid": list(self.grid), "weights": self.weights.to_json()}
        out |= {"blocks": self.blocks.to_json() | {"occupied": self.occupied}, "macs": _json(self.macs)}
        return out

    @staticmethod
    def read(fields: Fields, block: Block) -> Row:
        shape = fields.integers("shape", 1, MOST_AXES)
        if len(shape) < 2 or math.prod(shape) > MAX_INTEGER:
            raise fields.error("shape", f"the sizes of a weight with 2 to {MOST_AXES} axes")
        parts, transposed = fields.integer("parts", 1), fields.boolean("transposed")
        try:
            grid = block.grid(shape, parts, transposed)
        except SmartpruneError as error:
            raise SmartpruneError(f"{fields.where}: {error}") from None
        if fields.integers("grid", 1, MOST_AXES) != grid.shape:
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
