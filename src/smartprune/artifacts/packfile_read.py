"""Reads packed files. They are not trusted: everything is checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..core.block import Block, Layout
from ..core.occupancy import nonzero
from ..errors import SmartpruneError
from ..fields import MAX_INTEGER, Fields
from ..files import growth_limit
from .packfile import COLS, KEY, MAX_AXES, ROWS, VALUES, VERSION, PackedFile, PackedWeight, derived_entry, is_packed
from .receipt import Receipt
from .safetensors_file import CODES, DTYPES, read_entry, read_safetensors
from .tiles import tile_shape, to_tiles

MAX_NAMES = 200_000


def read_packed(path: Path, limit: int | None = None) -> PackedFile:
    """Reads a packed file. ``limit`` is the most bytes that the dense form may take; by default 64 MiB, or 256 times the size
    of a larger file."""
    where = str(path)
    size, metadata, tensors = read_safetensors(path)
    if not is_packed(metadata):
        raise SmartpruneError(f"{where}: not a packed file; its metadata has no {KEY!r}")
    limit = growth_limit(size) if limit is None else limit
    return _Reader(where, tensors, limit).read(read_entry(metadata, KEY, where))


class _Reader:
    """One file while it is read. ``tensors`` holds those that no entry has claimed yet."""

    def __init__(self, where: str, tensors: dict[str, Tensor], limit: int) -> None:
        self.where = where
        self.tensors = tensors
        self.limit = limit
        self.bytes = 0  # of the dense form, so far

    def read(self, fields: Fields) -> PackedFile:
        if fields.raw("version") != VERSION or type(fields.raw("version")) is not int:
            raise fields.error("version", f"{VERSION}; a newer smartprune may read it")
        fields.match("edge", "pad", "'pad'")
        block, names, tied = read_block(fields), _read_names(fields), _read_tied(fields)
        layouts: dict[str, Layout] = {}
        weights: dict[str, PackedWeight] = {}
        dense: list[tuple[Fields, Layout, torch.dtype]] = []
        for entry in fields.items("weights", MAX_NAMES):
            name, layout, dtype = _read_weight(entry, block)
            if name in layouts or name not in names or name in tied:
                raise entry.error("name", "one of names, not tied to another, and no name twice")
            layouts[name] = layout
            if entry.raw("blocks") is None:
                dense.append((entry, layout, dtype))
            else:
                weights[name] = self._weight(entry, name, layout, dtype, block)
            entry.reject_unknown_keys()
        for entry, layout, dtype in dense:
            tensor = self.tensors.get(str(entry.data["name"]))
            if tensor is None or tuple(tensor.shape) != layout.shape or tensor.dtype != dtype:
                raise SmartpruneError(f"{entry.where}: there is no tensor of that name, shape and dtype")
        stored = {*self.tensors, *weights}
        if set(names) != stored | set(tied) or stored & set(tied) or not set(tied.values()) <= stored:
            raise fields.error("names", "every tensor of the file, every weight in blocks and every tied name, once")
        receipt = fields.optional("receipt")
        packed = PackedFile(
            where=self.where,
            block=block,
            names=names,
            layouts=layouts,
            weights=weights,
            plain=self.tensors,
            tied=tied,
            receipt=None if receipt is None else Receipt.from_json(receipt.data, receipt.where),
        )
        mask_hash = fields.match("mask_hash", "sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits")
        fields.reject_unknown_keys()
        if packed.mask_hash != mask_hash:
            raise SmartpruneError(f"{self.where}: the hash of the kept blocks is {packed.mask_hash}, and mask_hash is {mask_hash}")
        return packed

    def _weight(self, entry: Fields, name: str, layout: Layout, dtype: torch.dtype, block: Block) -> PackedWeight:
        grid = layout.cut(block)
        rows, columns, *box = tile_shape(grid, layout.transposed)
        self.bytes += rows * columns * math.prod(box) * dtype.itemsize
        if self.bytes > self.limit:
            raise SmartpruneError(
                f"{self.where}: the weights up to {name} take {self.bytes:,} bytes when unpacked, and the limit is "
                f"{self.limit:,}; if you trust the file, give a larger limit= to unpack (--limit)"
            )
        n = entry.integer("blocks", 0, rows * columns)
        weight = PackedWeight(
            layout,
            grid,
            rows=self._take(name + ROWS, torch.int32, (rows + 1,)),
            cols=self._take(name + COLS, torch.int32, (n,)),
            values=self._take(name + VALUES, dtype, (n, *box)),
        )
        self._check_index(weight, name, columns)
        self._check_values(weight, name)
        return weight

    def _check_index(self, weight: PackedWeight, name: str, columns: int) -> None:
        rows, cols, n = weight.rows, weight.cols, len(weight.cols)
        if int(rows[0]) != 0 or int(rows[-1]) != n or bool((rows.diff() < 0).any()):
            raise SmartpruneError(f"{self.where}: {name + ROWS} must start at 0, never fall, and end at {n}")
        places = weight.row_of() * columns + cols
        if bool(((cols < 0) | (cols >= columns)).any()) or bool((places.diff() <= 0).any()):
            raise SmartpruneError(f"{self.where}: {name + COLS} must increase within each row and stay below {columns}")

    def _check_values(self, weight: PackedWeight, name: str) -> None:
        used, layout = nonzero(weight.values), weight.layout
        if not bool(used.flatten(1).any(1).all()):
            raise SmartpruneError(f"{self.where}: {name + VALUES} holds a block of zeros; such blocks must be left out")
        if weight.grid.ragged:
            ones = torch.ones(layout.shape, dtype=torch.bool, device="cpu")
            real = to_tiles(ones, weight.grid, layout.transposed)[weight.row_of(), weight.cols.long()]
            if bool((used & ~real).any()):
                raise SmartpruneError(f"{self.where}: {name + VALUES} holds more than zeros beyond the edge of the weight")

    def _take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            problem = "missing" if tensor is None else f"{CODES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
            raise SmartpruneError(f"{self.where}: {name} is {problem}; it must be {CODES[dtype]} {list(shape)}")
        return tensor


def read_block(fields: Fields) -> Block:
    """The block of a file, in its standard form."""
    try:
        block = Block.of(fields.text("block", max_length=100))
    except SmartpruneError as error:
        raise SmartpruneError(f"{fields.where}: {error}") from None
    if str(block) != fields.data["block"]:
        raise fields.error("block", f"{str(block)!r}, the standard form of that block")
    return block


def _read_names(fields: Fields) -> tuple[str, ...]:
    names = fields.raw("names")
    if not isinstance(names, list) or len(names) > MAX_NAMES or not all(isinstance(name, str) for name in names):
        raise fields.error("names", f"a list of at most {MAX_NAMES} texts")
    if len(set(names)) != len(names):
        raise fields.error("names", "a list without repetition")
    return tuple(names)


def _read_tied(fields: Fields) -> dict[str, str]:
    data = fields.nested("tied").data
    tied = {name: other for name, other in data.items() if isinstance(other, str) and other not in data}
    if len(tied) != len(data):
        raise fields.error("tied", "a dictionary from names to names of stored tensors")
    return tied


def read_layout(entry: Fields) -> Layout:
    """The axes of a weight. Whether the groups divide the first one is not checked."""
    shape = entry.integers("shape", 1, MAX_AXES)
    if len(shape) < 2 or math.prod(shape) > MAX_INTEGER:
        raise entry.error("shape", f"the sizes of a weight with 2 to {MAX_AXES} axes")
    return Layout(
        name=entry.text("layer"),
        kind=entry.text("kind", max_length=100),
        shape=shape,
        parts=entry.integer("groups", 1),
        transposed=entry.boolean("transposed"),
    )


def check_derived(entry: Fields, derived: Mapping[str, object]) -> None:
    """Raises unless the entry says what follows from the layout of its weight and the block."""
    for key, value in derived.items():
        if json.dumps(entry.raw(key)) != json.dumps(value):  # as text, because True == 1
            raise entry.error(key, f"{value}, which follows from shape, groups, transposed and block")


def _read_weight(entry: Fields, block: Block) -> tuple[str, Layout, torch.dtype]:
    layout = read_layout(entry)
    dtype = DTYPES.get(entry.text("dtype", max_length=10))
    if dtype is None:
        raise entry.error("dtype", f"one of {', '.join(DTYPES)}")
    try:
        derived = derived_entry(layout, block)
    except SmartpruneError as error:
        raise SmartpruneError(f"{entry.where}: {error}") from None
    check_derived(entry, derived)
    return entry.text("name"), layout, dtype
