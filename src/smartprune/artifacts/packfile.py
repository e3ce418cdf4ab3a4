"""The packed file: kept blocks side by side, an index, and all that a reader needs to know. ``docs/format.md`` is its
specification."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..core.block import Axis, Block, Grid, Layout
from ..core.occupancy import map_hash, nonzero
from ..errors import SmartpruneError
from ..fields import MAX_INTEGER, Fields
from ..files import parse_json
from .receipt import Receipt

KEY = "smartprune.packed"  # the one entry of the safetensors metadata
METADATA = "__metadata__"  # which no tensor can be called
VERSION = 1
VALUES, ROWS, COLS = "#values", "#rows", "#cols"
ALIGNED = 64  # bytes: where the data starts, and every block whose size allows it
MOST_TEXT = 1 << 26
MOST_NAMES = 200_000
MOST_AXES = 8
FREE = 1 << 30  # bytes of dense form that need no justification by the size of the file
GROWTH = 1000  # times its size that a file may unpack to
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # values are moved as bits, so that none changes


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The kept blocks of one weight, in the order in which a kernel walks them.

    ``rows`` [R + 1] says where each row of blocks starts in ``cols`` and ``values``; a row is one block of output channels
    (of one group). ``cols`` [n] is ``kernel position * blocks of input channels + block of input channels``, increasing
    within a row. ``values`` [n, *kernel, input, output] has the output channel fastest, edge blocks filled up with zeros.
    """

    layout: Layout
    grid: Grid
    rows: Tensor = field(repr=False)
    cols: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @staticmethod
    def of(layout: Layout, grid: Grid, weight: Tensor) -> PackedWeight:
        weight = weight.detach().cpu()
        used = _tile(nonzero(weight), grid, layout.transposed).flatten(2).any(2)
        rows = torch.zeros(used.shape[0] + 1, dtype=torch.int32, device="cpu")
        rows[1:] = used.sum(1).cumsum(0)
        values = _tile(_raw(weight.contiguous()), grid, layout.transposed)[used].view(weight.dtype)
        return PackedWeight(layout, grid, rows, used.nonzero()[:, 1].to(torch.int32), values)

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.rows, self.cols, self.values))

    def row_of(self) -> Tensor:
        """The row of every kept block, int64 [n]."""
        return torch.repeat_interleave(torch.arange(len(self.rows) - 1, device="cpu"), self.rows.diff().long())

    def occupied(self) -> Tensor:
        """For every block of the grid whether it is kept, bool [grid.n]."""
        used = torch.zeros(tile_shape(self.grid, self.layout.transposed)[:2], dtype=torch.bool, device="cpu")
        used[self.row_of(), self.cols.long()] = True
        ones = Grid(tuple(Axis(axis.parts, axis.per_part, 1) for axis in self.grid.axes))
        return _untile(used, ones, self.layout.transposed).reshape(-1)

    def dense(self) -> Tensor:
        """The weight as it was, zeros where no block is."""
        raw = _raw(self.values)
        full = torch.zeros(tile_shape(self.grid, self.layout.transposed), dtype=raw.dtype, device="cpu")
        full[self.row_of(), self.cols.long()] = raw
        return _untile(full, self.grid, self.layout.transposed).view(self.values.dtype)


@dataclass(frozen=True, eq=False)
class PackedFile:
    """What a packed file holds: ``weights`` in blocks, ``plain`` tensors as they are, names that share a tensor."""

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
        """Hash of which blocks are kept, over the weights in blocks, in order."""
        return map_hash(self.block, ((name, weight.grid.shape, weight.occupied()) for name, weight in self.weights.items()))

    def dense(self) -> dict[str, Tensor]:
        """The plain state dict; tied names share one tensor."""
        found = {**self.plain, **{name: weight.dense() for name, weight in self.weights.items()}}
        return {name: found[self.tied.get(name, name)] for name in self.names}

    def to_bytes(self) -> bytes:
        """The file. Equal contents give equal bytes."""
        tensors = dict(self.plain)
        for name, weight in self.weights.items():
            for ending, part in ((VALUES, weight.values), (ROWS, weight.rows), (COLS, weight.cols)):
                if name + ending in tensors or name + ending in self.tied:
                    raise SmartpruneError(f"pack: {name + ending} is the name of a tensor, and of the blocks of {name}; rename it")
                tensors[name + ending] = part
        for name in self.names:
            if not name.isprintable() or not 0 < len(name) <= 1000:
                raise SmartpruneError(f"pack: {name[:40]!r} is no name of 1 to 1000 printable characters; rename it")
            if name == METADATA:
                raise SmartpruneError(f"pack: {name!r} is a name that safetensors files keep for themselves; rename the tensor")
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

    def _entry(self, name: str) -> dict[str, object]:
        layout, packed = self.layouts[name], self.weights.get(name)
        rows, columns, *box = tile_shape(layout.cut(self.block), layout.transposed)
        return {
            "name": name,
            "layer": layout.name,
            "kind": layout.kind,
            "dtype": code_of(name, self.plain[name] if packed is None else packed.values),
            "shape": list(layout.shape),
            "kernel": list(layout.shape[2:]),
            "groups": layout.parts,
            "transposed": layout.transposed,
            "output_axis": int(layout.transposed),
            "input_axis": int(not layout.transposed),
            "block": [box[-1], box[-2], *box[:-2]],
            "rows": rows,
            "columns": columns,
            "blocks": None if packed is None else len(packed.cols),
        }


def is_packed(metadata: Mapping[str, str] | None) -> bool:
    return metadata is not None and KEY in metadata


def is_packed_file(path: Path) -> bool:
    """Whether a file is a packed one, whatever its name."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return is_packed(file.metadata())
    except Exception:  # not a safetensors file, or none at all; the library has no error type for all of it
        return False


def check_header(path: Path) -> None:
    """Refuses a safetensors file that has two entries for one name, of which every reader may take another one. Its size
    was checked when it was opened."""
    with path.open("rb") as file:
        parse_json(file.read(int.from_bytes(file.read(8), "little")), f"{path}: header")


def read_packed(path: Path, limit: int | None = None) -> PackedFile:
    """Reads a packed file that nobody vouches for: everything is checked before it is used.

    ``limit`` is the most bytes that the dense form may take; without it, 1 GiB, or for larger files 1000 times their size.
    """
    where = str(path)
    try:
        size = path.stat().st_size
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # the library has no error type for all of it
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SmartpruneError(f"{where}: not a readable safetensors file ({first})") from None
    check_header(path)
    if not is_packed(metadata):
        raise SmartpruneError(f"{where}: not a packed file; the metadata of one holds {KEY!r}")
    if len(metadata[KEY]) > MOST_TEXT:
        raise SmartpruneError(f"{where}: {KEY} is longer than {MOST_TEXT:,} characters, which that of no model is")
    limit = max(FREE, GROWTH * size) if limit is None else limit
    return _Reader(where, tensors, limit).read(Fields(parse_json(metadata[KEY], f"{where}: {KEY}"), f"{where}: {KEY}"))


class _Reader:
    """One file while it is read; ``left`` are the tensors that nothing has claimed yet."""

    def __init__(self, where: str, tensors: dict[str, Tensor], limit: int) -> None:
        self.where = where
        self.left = tensors
        self.limit = limit
        self.bytes = 0  # of the dense form, so far

    def read(self, fields: Fields) -> PackedFile:
        if fields.raw("version") != VERSION or type(fields.raw("version")) is not int:
            raise fields.error("version", f"{VERSION}; a newer smartprune may read it")
        fields.match("edge", "pad", "'pad'")
        try:
            block = Block.of(fields.text("block", max_length=100))
        except SmartpruneError as error:
            raise SmartpruneError(f"{fields.where}: {error}") from None
        if str(block) != fields.data["block"]:
            raise fields.error("block", f"{str(block)!r}, which is how that block is written")
        names, tied = self._names(fields), self._tied(fields)
        layouts: dict[str, Layout] = {}
        weights: dict[str, PackedWeight] = {}
        dense: list[tuple[Fields, Layout, torch.dtype]] = []
        for entry in fields.items("weights", MOST_NAMES):
            name, layout, dtype = self._layout(entry, block)
            if name in layouts or name not in names or name in tied:
                raise entry.error("name", "one of names, not tied to another, and no name twice")
            layouts[name] = layout
            if entry.raw("blocks") is None:
                dense.append((entry, layout, dtype))
            else:
                weights[name] = self._weight(entry, name, layout, dtype, block)
            entry.reject_unknown_keys()
        plain = self.left
        for entry, layout, dtype in dense:
            tensor = plain.get(str(entry.data["name"]))
            if tensor is None or tuple(tensor.shape) != layout.shape or tensor.dtype != dtype:
                raise SmartpruneError(f"{entry.where}: there is no tensor of that name, shape and dtype")
        stored = {*plain, *weights}
        if set(names) != stored | set(tied) or stored & set(tied) or not set(tied.values()) <= stored:
            raise fields.error("names", "every tensor of the file, every weight in blocks and every tied name, once")
        receipt = fields.optional("receipt")
        out = PackedFile(
            where=self.where,
            block=block,
            names=names,
            layouts=layouts,
            weights=weights,
            plain=plain,
            tied=tied,
            receipt=None if receipt is None else Receipt.from_json(receipt.data, receipt.where),
        )
        said = fields.match("mask_hash", "sha256:[0-9a-f]{64}", "'sha256:' and 64 hexadecimal digits")
        fields.reject_unknown_keys()
        if out.mask_hash != said:
            raise SmartpruneError(f"{self.where}: the hash of the kept blocks is {out.mask_hash}, and mask_hash is {said}")
        return out

    def _names(self, fields: Fields) -> tuple[str, ...]:
        names = fields.raw("names")
        if not isinstance(names, list) or len(names) > MOST_NAMES or not all(isinstance(name, str) for name in names):
            raise fields.error("names", f"a list of at most {MOST_NAMES} texts")
        if len(set(names)) != len(names):
            raise fields.error("names", "a list without repetition")
        return tuple(names)

    def _tied(self, fields: Fields) -> dict[str, str]:
        tied = fields.nested("tied").data
        out = {name: other for name, other in tied.items() if isinstance(other, str) and other not in tied}
        if len(out) != len(tied):
            raise fields.error("tied", "a dictionary from names to names of stored tensors")
        return out

    def _layout(self, entry: Fields, block: Block) -> tuple[str, Layout, torch.dtype]:
        shape = entry.integers("shape", 1, MOST_AXES)
        if len(shape) < 2 or math.prod(shape) > MAX_INTEGER:
            raise entry.error("shape", f"the sizes of a weight with 2 to {MOST_AXES} axes")
        layout = Layout(
            name=entry.text("layer"),
            kind=entry.text("kind", max_length=100),
            shape=shape,
            parts=entry.integer("groups", 1),
            transposed=entry.boolean("transposed"),
        )
        dtype = DTYPES.get(entry.text("dtype", max_length=10))
        if dtype is None:
            raise entry.error("dtype", f"one of {', '.join(DTYPES)}")
        try:
            grid = layout.cut(block)
        except SmartpruneError as error:
            raise SmartpruneError(f"{entry.where}: {error}") from None
        rows, columns, *box = tile_shape(grid, layout.transposed)
        follows = {
            "kernel": list(shape[2:]),
            "output_axis": int(layout.transposed),
            "input_axis": int(not layout.transposed),
            "block": [box[-1], box[-2], *box[:-2]],
            "rows": rows,
            "columns": columns,
        }
        for key, value in follows.items():
            if json.dumps(entry.raw(key)) != json.dumps(value):  # as text: true is not 1
                raise entry.error(key, f"{value}, which follows from shape, groups, transposed and block")
        return entry.text("name"), layout, dtype

    def _weight(self, entry: Fields, name: str, layout: Layout, dtype: torch.dtype, block: Block) -> PackedWeight:
        grid = layout.cut(block)
        rows, columns, *box = tile_shape(grid, layout.transposed)
        self.bytes += rows * columns * math.prod(box) * dtype.itemsize
        if self.bytes > self.limit:
            raise SmartpruneError(
                f"{self.where}: {name} and what comes before it take {self.bytes:,} bytes when unpacked, and the limit is "
                f"{self.limit:,}; give a larger limit= if you trust the file"
            )
        n = entry.integer("blocks", 0, rows * columns)
        pointers = self._take(name + ROWS, torch.int32, (rows + 1,))
        cols = self._take(name + COLS, torch.int32, (n,))
        values = self._take(name + VALUES, dtype, (n, *box))
        if int(pointers[0]) != 0 or int(pointers[-1]) != n or bool((pointers.diff() < 0).any()):
            raise SmartpruneError(f"{self.where}: {name + ROWS} must start at 0, never fall, and end at {n}")
        out = PackedWeight(layout, grid, pointers, cols, values)
        row = out.row_of()
        place = row * columns + cols
        if bool(((cols < 0) | (cols >= columns)).any()) or bool((place.diff() <= 0).any()):
            raise SmartpruneError(f"{self.where}: {name + COLS} must increase within each row and stay below {columns}")
        used = nonzero(values)
        if not bool(used.flatten(1).any(1).all()):
            raise SmartpruneError(f"{self.where}: {name + VALUES} has a block of zeros, and those are left out")
        if grid.ragged:
            real = _tile(torch.ones(layout.shape, dtype=torch.bool, device="cpu"), grid, layout.transposed)[row, cols.long()]
            if bool((used & ~real).any()):
                raise SmartpruneError(f"{self.where}: {name + VALUES} has more than zeros beyond the edge of the weight")
        return out

    def _take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        tensor = self.left.pop(name, None)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found = "missing" if tensor is None else f"{CODES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"
            raise SmartpruneError(f"{self.where}: {name} is {found}; it must be {CODES[dtype]} {list(shape)}")
        return tensor


def code_of(name: str, tensor: Tensor) -> str:
    """The name of its number type in a file."""
    if tensor.dtype not in CODES:
        raise SmartpruneError(f"{name}: {tensor.dtype} cannot be stored; it can be {', '.join(DTYPES)}")
    return CODES[tensor.dtype]


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """A safetensors file, in pieces; the same tensors always give the same bytes.

    The library that reads these files writes them too, but says nothing of order and alignment: here the data starts at a
    multiple of 64 bytes, and tensors whose size is a multiple of 64 come first.
    """
    order = sorted(tensors, key=lambda name: (_size(tensors[name]) % ALIGNED != 0, -tensors[name].element_size(), name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name in order:
        tensor = tensors[name]
        code = code_of(name, tensor)
        stop = start + _size(tensor)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield _raw(tensors[name].detach().cpu().contiguous()).numpy().tobytes()


def safetensors_size(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Bytes that a file of these tensors takes, without making it."""
    empty = dict(tensors)
    header = next(safetensors_bytes({name: tensor.detach() for name, tensor in empty.items()}))
    return len(header) + sum(map(_size, empty.values()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _raw(tensor: Tensor) -> Tensor:
    """The same bits as integers."""
    return tensor.view(RAW[tensor.element_size()])


def _order(grid: Grid, transposed: bool) -> tuple[Axis, ...]:
    """The axes as (out, in, *kernel)."""
    first, second, *kernel = grid.axes
    return (second, first, *kernel) if transposed else (first, second, *kernel)


def tile_shape(grid: Grid, transposed: bool) -> tuple[int, ...]:
    """Rows of blocks, columns of blocks, then one block as (*kernel, in, out)."""
    out, into, *kernel = _order(grid, transposed)
    columns = math.prod(axis.per_part for axis in kernel) * into.per_part
    return (grid.axes[0].parts * out.per_part, columns, *(axis.step for axis in kernel), into.step, out.step)


def _tile(weight: Tensor, grid: Grid, transposed: bool) -> Tensor:
    """A weight as [rows, columns, *kernel, in, out], edge blocks filled up with zeros."""
    order, parts = _order(grid, transposed), grid.axes[0].parts
    out: Tensor = weight.unflatten(0, (parts, grid.axes[0].length))
    out = out.transpose(1, 2) if transposed else out
    for dim, axis in enumerate(order, 1):
        short = axis.per_part * axis.step - axis.length
        if short:
            out = torch.cat([out, out.new_zeros(*out.shape[:dim], short, *out.shape[dim + 1 :])], dim)
    out = out.reshape(parts, *(n for axis in order for n in (axis.per_part, axis.step)))
    return out.permute(_permutation(len(order))).reshape(tile_shape(grid, transposed))


def _untile(tiles: Tensor, grid: Grid, transposed: bool) -> Tensor:
    """What :func:`_tile` was given."""
    order, parts = _order(grid, transposed), grid.axes[0].parts
    there = _permutation(len(order))
    split = [parts, *(n for axis in order for n in (axis.per_part, axis.step))]
    out: Tensor = tiles.reshape([split[i] for i in there]).permute([there.index(i) for i in range(len(there))])
    out = out.reshape(parts, *(axis.per_part * axis.step for axis in order))
    for dim, axis in enumerate(order, 1):
        out = out.narrow(dim, 0, axis.length)
    out = out.transpose(1, 2) if transposed else out
    return out.flatten(0, 1).contiguous()


def _permutation(axes: int) -> list[int]:
    """From (group, then count and step of out, in, *kernel) to (group, out, *kernel, in; *kernel, in, out)."""
    kernel = range(5, 1 + 2 * axes, 2)
    return [0, 1, *kernel, 3, *(i + 1 for i in kernel), 4, 2]
