"""The packed file: kept blocks side by side, an index, and what a reader needs to know. ``docs/format.md`` specifies it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..core.block import Axis, Block, Grid, Layout
from ..core.occupancy import map_hash, nonzero
from ..errors import SmartpruneError
from ..files import check_readable
from .receipt import Receipt
from .safetensors_file import METADATA, as_integers, dtype_code, safetensors_bytes, tensor_bytes
from .tiles import from_tiles, tile_shape, to_tiles

KEY = "smartprune.packed"  # the one entry of the safetensors metadata
VERSION = 1
VALUES, ROWS, COLS = "#values", "#rows", "#cols"
MAX_AXES = 8


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The kept blocks of one weight, in the order in which a kernel walks them.

    ``rows`` [R + 1] says where each row of blocks starts in ``cols`` and ``values``; a row is one block of output channels
    (of one group). ``cols`` [n] is ``kernel position * blocks of input channels + block of input channels``, increasing
    within a row. ``values`` [n, *kernel, input, output] has the output channel fastest, and edge blocks padded with zeros.
    """

    layout: Layout
    grid: Grid
    rows: Tensor = field(repr=False)
    cols: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @staticmethod
    def of(layout: Layout, grid: Grid, weight: Tensor) -> PackedWeight:
        weight = weight.detach().cpu()
        used = to_tiles(nonzero(weight), grid, layout.transposed).flatten(2).any(2)
        rows = torch.zeros(used.shape[0] + 1, dtype=torch.int32, device="cpu")
        rows[1:] = used.sum(1).cumsum(0)
        values = to_tiles(as_integers(weight.contiguous()), grid, layout.transposed)[used].view(weight.dtype)
        return PackedWeight(layout, grid, rows, used.nonzero()[:, 1].to(torch.int32), values)

    @property
    def nbytes(self) -> int:
        return sum(map(tensor_bytes, (self.rows, self.cols, self.values)))

    def row_of(self) -> Tensor:
        """The row of every kept block, int64 [n]."""
        return torch.repeat_interleave(torch.arange(len(self.rows) - 1, device="cpu"), self.rows.diff().long())

    def occupied(self) -> Tensor:
        """For every block of the grid whether it is kept, bool [grid.n]."""
        used = torch.zeros(tile_shape(self.grid, self.layout.transposed)[:2], dtype=torch.bool, device="cpu")
        used[self.row_of(), self.cols.long()] = True
        single = Grid(tuple(Axis(axis.parts, axis.per_part, 1) for axis in self.grid.axes))
        return from_tiles(used, single, self.layout.transposed).reshape(-1)

    def dense(self) -> Tensor:
        """The original weight, with zeros where no block is stored."""
        integers = as_integers(self.values)
        tiles = torch.zeros(tile_shape(self.grid, self.layout.transposed), dtype=integers.dtype, device="cpu")
        tiles[self.row_of(), self.cols.long()] = integers
        return from_tiles(tiles, self.grid, self.layout.transposed).view(self.values.dtype)


@dataclass(frozen=True, eq=False)
class PackedFile:
    """The contents of a packed file: ``weights`` in blocks, ``plain`` tensors unchanged, and names that share a tensor."""

    where: str
    block: Block
    names: tuple[str, ...]  # of the whole state dict, in its order
    layouts: Mapping[str, Layout]  # of all weights that can be cut, in blocks or not
    weights: Mapping[str, PackedWeight] = field(repr=False)
    plain: Mapping[str, Tensor] = field(repr=False)
    tied: Mapping[str, str]
    receipt: Receipt | None = field(default=None, repr=False)

    @property
    def mask_hash(self) -> str:
        """The hash of which blocks are kept, over the weights in blocks, in order."""
        return map_hash(self.block, ((name, weight.grid.shape, weight.occupied()) for name, weight in self.weights.items()))

    def dense(self) -> dict[str, Tensor]:
        """The plain state dict; tied names share one tensor."""
        tensors = {**self.plain, **{name: weight.dense() for name, weight in self.weights.items()}}
        return {name: tensors[self.tied.get(name, name)] for name in self.names}

    def to_bytes(self) -> bytes:
        """The file. Equal contents give equal bytes."""
        self._check_names()
        tensors = dict(self.plain)
        for name, weight in self.weights.items():
            tensors |= {name + VALUES: weight.values, name + ROWS: weight.rows, name + COLS: weight.cols}
        header = {
            "version": VERSION,
            "block": str(self.block),
            "edge": "pad",
            "names": list(self.names),
            "weights": [self._entry(name) for name in self.layouts],
            "tied": dict(self.tied),
            "mask_hash": self.mask_hash,
            "receipt": None if self.receipt is None else self.receipt.to_json(),
        }
        return b"".join(safetensors_bytes(tensors, {KEY: json.dumps(header, sort_keys=True, separators=(",", ":"))}))

    def _check_names(self) -> None:
        for name in (name + ending for name in self.weights for ending in (VALUES, ROWS, COLS)):
            if name in self.plain or name in self.tied:
                raise SmartpruneError(f"pack: {name} is reserved for the blocks of {name.rpartition('#')[0]}; rename that tensor")
        for name in self.names:
            if not name.isprintable() or not 0 < len(name) <= 1000:
                raise SmartpruneError(f"pack: the name {name[:40]!r} must have 1 to 1000 printable characters; rename the tensor")
            if name == METADATA:
                raise SmartpruneError(f"pack: the name {name!r} is reserved in safetensors files; rename the tensor")

    def _entry(self, name: str) -> dict[str, object]:
        layout, packed = self.layouts[name], self.weights.get(name)
        return {
            "name": name,
            "layer": layout.name,
            "kind": layout.kind,
            "dtype": dtype_code(name, self.plain[name] if packed is None else packed.values),
            "shape": list(layout.shape),
            "groups": layout.parts,
            "transposed": layout.transposed,
            **derived_entry(layout, self.block),
            "blocks": None if packed is None else len(packed.cols),
        }


def derived_entry(layout: Layout, block: Block) -> dict[str, object]:
    """The part of an entry that follows from the layout of a weight and the block."""
    rows, columns, *box = tile_shape(layout.cut(block), layout.transposed)
    return {
        "kernel": list(layout.shape[2:]),
        "output_axis": int(layout.transposed),
        "input_axis": int(not layout.transposed),
        "block": [box[-1], box[-2], *box[:-2]],
        "rows": rows,
        "columns": columns,
    }


def is_packed(metadata: Mapping[str, str] | None) -> bool:
    return metadata is not None and KEY in metadata


def is_packed_file(path: Path) -> bool:
    """Whether a file is a packed one, whatever its name."""
    try:
        check_readable(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            return is_packed(file.metadata())
    except Exception:  # the library has no common error type for files that are not safetensors
        return False
