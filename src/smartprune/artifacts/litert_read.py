"""Reads the weights of LiteRT files, and what smartprune stores in them. Files are not trusted, and nothing is run.

A LiteRT file is a flatbuffer: tables that name their fields by offsets. Every offset is checked before it is followed, so that a
damaged file gives an error. This module needs numpy alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.block import Block, Layout
from ..errors import SmartpruneError
from ..fields import Fields
from ..files import growth_limit, parse_json, read_limited
from .receipt import Receipt

MAX_BYTES = 1 << 31  # the limit of a flatbuffer
IDENTIFIER = b"TFL3"
# Entries of the metadata
BLOCK, RECEIPT = "smartprune.block", "smartprune.receipt"
SHAPES, ABSENT = "smartprune.shapes", "smartprune.absent"
MAX_AXES = 8
MAX_NAME = 1000
MAX_ENTRIES = 1000  # of metadata
MAX_GRAPHS = 1000
MAX_ABSENT = 100_000
DTYPES = {0: np.float32, 1: np.float16, 3: np.uint8, 7: np.int16, 9: np.int8}  # numbers of tensor types
INDEX_DTYPES = {1: np.dtype("<i4"), 2: np.dtype("<u2"), 3: np.dtype("u1")}
# Operations with a weight: their numbers, the input that holds it, and the order of its axes in torch
CONV, DEPTHWISE, LINEAR, TRANSPOSED, DENSIFY = 3, 4, 9, 67, 124
WEIGHT = {CONV: 1, DEPTHWISE: 1, LINEAR: 1, TRANSPOSED: 1}
ORDER = {CONV: (0, 3, 1, 2), DEPTHWISE: (3, 0, 1, 2), TRANSPOSED: (3, 0, 1, 2)}


@dataclass(frozen=True, eq=False)
class LitertFile:
    """The weights of a file as torch stores them; those in int8 are integers. ``sparse`` names those that are stored sparse."""

    where: str
    weights: Mapping[str, Tensor] = field(repr=False)
    shapes: Mapping[str, Layout] = field(repr=False)
    sparse: tuple[str, ...] = ()
    block: Block | None = None
    receipt: Receipt | None = field(default=None, repr=False)
    absent: tuple[str, ...] = ()  # weights of the receipt that no operation uses

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def layouts(self) -> dict[str, Layout]:
        return dict(self.shapes)


def read_litert(path: Path) -> LitertFile:
    """Reads a LiteRT file of any origin."""
    return parse_litert(read_limited(path, MAX_BYTES), str(path))


def parse_litert(data: bytes, where: str) -> LitertFile:
    if data[4:8] != IDENTIFIER:
        raise SmartpruneError(
            f"{where}: not a LiteRT file: bytes 4 to 8 must be {IDENTIFIER.decode()}; check that it is the right file"
        )
    try:
        return _File(data, where).read()
    except (struct.error, IndexError, ValueError, OverflowError, UnicodeDecodeError) as error:
        raise SmartpruneError(f"{where}: not a readable LiteRT file ({error}); it may be damaged or cut off") from None


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer: ``at`` is its place."""

    data: bytes
    at: int

    def _place(self, slot: int) -> int | None:
        """The place of a field. None if the table leaves it out."""
        table = self.at - struct.unpack_from("<i", self.data, self.at)[0]
        if self.at < 0 or table < 0:
            raise ValueError("a table lies outside the file")
        if 4 + 2 * slot + 2 > struct.unpack_from("<H", self.data, table)[0]:
            return None
        offset = struct.unpack_from("<H", self.data, table + 4 + 2 * slot)[0]
        return self.at + offset if offset else None

    def number(self, slot: int, kind: str = "<i", default: int = 0) -> int:
        place = self._place(slot)
        return default if place is None else int(struct.unpack_from(kind, self.data, place)[0])

    def _target(self, slot: int) -> int | None:
        place = self._place(slot)
        return None if place is None else place + struct.unpack_from("<I", self.data, place)[0]

    def table(self, slot: int) -> _Table | None:
        target = self._target(slot)
        return None if target is None else _Table(self.data, target)

    def array(self, slot: int, dtype: Any, limit: int = MAX_BYTES) -> Any:
        """A vector of numbers, which shares the memory of the file. Many tables may point to one: ``limit`` bounds the work."""
        target, dtype = self._target(slot), np.dtype(dtype)
        if target is None:
            return np.zeros(0, dtype)
        length = struct.unpack_from("<I", self.data, target)[0]
        if length > limit:
            raise ValueError(f"a list has {length} entries, and at most {limit} are allowed")
        return np.frombuffer(self.data, dtype, length, target + 4)

    def text(self, slot: int, limit: int = MAX_NAME) -> str:
        return bytes(self.array(slot, np.uint8, limit)).decode()

    def tables(self, slot: int, limit: int = MAX_BYTES) -> list[_Table]:
        offsets = self.array(slot, "<u4", limit)
        start = (self._target(slot) or 0) + 4
        return [_Table(self.data, start + 4 * i + int(offset)) for i, offset in enumerate(offsets)]


@dataclass
class _File:
    data: bytes
    where: str
    used: int = 0  # bytes of dense weights so far

    def read(self) -> LitertFile:
        model = _Table(self.data, struct.unpack_from("<I", self.data, 0)[0])
        self.buffers = model.tables(4)
        codes = [max(code.number(0, "<b"), code.number(3)) for code in model.tables(1)]
        metadata = {entry.text(0): self.buffers[entry.number(1, "<I")] for entry in model.tables(6, MAX_ENTRIES)}
        self.shapes = self._shapes(metadata)
        tensors: dict[str, Tensor] = {}
        layouts: dict[str, Layout] = {}
        sparse: list[str] = []
        for graph in model.tables(2, MAX_GRAPHS):
            for name, tensor, layout, is_sparse in self._weights(graph, codes):
                unique, count = name, 1
                while unique in tensors:
                    count += 1
                    unique = f"{name}#{count}"
                tensors[unique], layouts[unique] = tensor, layout
                sparse += [unique] if is_sparse else []
        if not tensors:
            raise SmartpruneError(f"{self.where}: no convolution or linear layer has a stored weight; is this the right file?")
        return LitertFile(
            self.where, tensors, layouts, tuple(sparse), self._block(metadata), self._receipt(metadata), self._absent(metadata)
        )

    def _weights(self, graph: _Table, codes: list[int]) -> Iterator[tuple[str, Tensor, Layout, bool]]:
        """The weights of a graph: name, numbers, layout, and whether they are sparse."""
        tables = graph.tables(0)
        operators = [(codes[x.number(0, "<I")], x.array(1, "<i4"), x.array(2, "<i4")) for x in graph.tables(3)]
        stored = {int(outputs[0]): int(inputs[0]) for code, inputs, outputs in operators if code == DENSIFY}
        seen: set[int] = set()
        for code, inputs, _ in operators:
            if code not in WEIGHT or int(inputs[WEIGHT[code]]) < 0:
                continue
            index = int(inputs[WEIGHT[code]])
            index = stored.get(index, index)
            if index in seen:
                continue
            seen.add(index)
            table = tables[index]
            array = self._array(table)
            if array is None or array.ndim != (2 if code == LINEAR else 4):
                continue
            name, groups = table.text(3), 1
            channels = tables[int(inputs[0])].array(0, "<i4", MAX_AXES)
            if code in (CONV, DEPTHWISE) and len(channels) == 4:
                groups = max(int(channels[-1]) // max(array.shape[3], 1), 1) if code == CONV else int(channels[-1])
            tensor = np.ascontiguousarray(array.transpose(ORDER[code])) if code in ORDER else array
            shape = self.shapes.get(name)
            if shape is not None and math.prod(shape) == tensor.size:
                tensor = tensor.reshape(shape)  # a 1-D convolution is stored as one over images
            kind = "Linear" if code == LINEAR else f"Conv{'Transpose' if code == TRANSPOSED else ''}{tensor.ndim - 2}d"
            layout = Layout(name.removesuffix(".weight"), kind, tuple(tensor.shape), groups, code == TRANSPOSED)
            yield name, torch.from_numpy(tensor.copy()), layout, table.table(6) is not None

    def _array(self, table: _Table) -> Any:
        """The numbers of a tensor. None if it is computed."""
        shape = tuple(int(n) for n in table.array(0, "<i4", MAX_AXES))
        dtype = DTYPES.get(table.number(1, "<b"))
        buffer = self.buffers[table.number(2, "<I")]
        data = buffer.array(0, np.uint8)
        if not data.size or dtype is None:
            return None
        if min(shape, default=1) < 0:
            raise ValueError(f"a tensor has the shape {shape}")
        size = math.prod(shape)
        self.used += size * np.dtype(dtype).itemsize + data.size
        limit = growth_limit(len(self.data))
        if self.used > limit:
            raise SmartpruneError(
                f"{self.where}: its weights take more than {limit:,} bytes in memory, which its size does not explain; "
                "it is damaged or hostile"
            )
        numbers = data.view(np.dtype(dtype).newbyteorder("<")) if data.size % np.dtype(dtype).itemsize == 0 else data[:0]
        sparsity = table.table(6)
        if sparsity is not None:
            return self._dense(numbers, shape, sparsity)
        if numbers.size != size:
            raise ValueError(f"a tensor of {size} numbers stores {numbers.size}")
        return numbers.reshape(shape)

    def _dense(self, numbers: Any, shape: tuple[int, ...], sparsity: _Table) -> Any:
        """A tensor whose last axis is sparse, in blocks or not: the forms that smartprune writes and kernels read."""
        axes = sparsity.tables(2, MAX_AXES)
        blocked = len(sparsity.array(1, "<i4", MAX_AXES)) == 1
        order = [int(n) for n in sparsity.array(0, "<i4", MAX_AXES)]
        sizes = [axis.number(1) for axis in axes[: len(shape) - 1]]
        plain = order == list(range(len(shape) + blocked)) and len(axes) == len(order) and len(shape) > 0
        if not plain or sizes != list(shape[:-1]) or axes[len(shape) - 1].number(0, "<b") != 1:
            raise ValueError("a sparse tensor has a form that is not supported: only the last axis may be sparse")
        block = axes[-1].number(1) if blocked else 1
        rows = math.prod(shape[:-1])
        segments, columns = (self._indices(axes[len(shape) - 1], *slot) for slot in ((2, rows + 1), (4, numbers.size)))
        if block < 1 or shape[-1] % block or len(segments) != rows + 1 or numbers.size != len(columns) * block:
            raise ValueError("a sparse tensor has indices that do not fit its shape")
        counts = np.diff(segments)
        if segments[0] != 0 or segments[-1] != len(columns) or (counts < 0).any() or (columns >= shape[-1] // block).any():
            raise ValueError("a sparse tensor has indices out of range")
        out = np.zeros((rows, shape[-1] // block, block), numbers.dtype)
        out[np.repeat(np.arange(rows), counts), columns] = numbers.reshape(-1, block)
        return out.reshape(shape)

    @staticmethod
    def _indices(axis: _Table, slot: int, limit: int) -> Any:
        dtype, vector = INDEX_DTYPES.get(axis.number(slot, "<B")), axis.table(slot + 1)
        if dtype is None or vector is None:
            raise ValueError("a sparse tensor has no indices")
        out = vector.array(0, dtype, limit).astype(np.int64)
        if (out < 0).any():
            raise ValueError("a sparse tensor has negative indices")
        return out

    def _text(self, metadata: Mapping[str, _Table], name: str) -> str | None:
        return metadata[name].text(0, MAX_BYTES) if name in metadata else None

    def _shapes(self, metadata: Mapping[str, _Table]) -> dict[str, tuple[int, ...]]:
        written = self._text(metadata, SHAPES)
        shapes = {} if written is None else parse_json(written, f"{self.where}: {SHAPES}")
        if not isinstance(shapes, dict) or not all(
            isinstance(shape, list) and len(shape) <= MAX_AXES and all(type(n) is int and n > 0 for n in shape)
            for shape in shapes.values()
        ):
            raise SmartpruneError(f"{self.where}: {SHAPES} must hold the shapes of weights, as lists of sizes; the file is damaged")
        return {name: tuple(shape) for name, shape in shapes.items()}

    def _block(self, metadata: Mapping[str, _Table]) -> Block | None:
        written = self._text(metadata, BLOCK)
        try:
            return None if written is None else Block.of(written[:100])
        except SmartpruneError as error:
            raise SmartpruneError(f"{self.where}: {BLOCK}: {error}") from None

    def _absent(self, metadata: Mapping[str, _Table]) -> tuple[str, ...]:
        where, written = f"{self.where}: {ABSENT}", self._text(metadata, ABSENT)
        return () if written is None else Fields({ABSENT: parse_json(written, where)}, self.where).texts(ABSENT, MAX_ABSENT)

    def _receipt(self, metadata: Mapping[str, _Table]) -> Receipt | None:
        where, written = f"{self.where}: {RECEIPT}", self._text(metadata, RECEIPT)
        return None if written is None else Receipt.from_json(parse_json(written, where), where)
