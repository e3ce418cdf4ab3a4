"""Reads files of ``torch.save``. They are not trusted: no code runs, and memory and time follow from the size of the file.

``torch.load(weights_only=True)`` runs no code either, but 150 bytes can make it allocate gigabytes. Here a pickle is first read
into plain values and descriptions of tensors. A tensor is built after its description was compared with what the file stores.
"""

from __future__ import annotations

import errno
import io
import math
import pickle
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import SmartpruneError
from ..files import FREE_BYTES, file_size, open_regular
from ..pickles import value_limit
from .torch_pickle import COMPRESSED, REBUILD, TYPES, Call, Inert, Name, Storage, Unpickler, dtype_of

MAX_PICKLE = 1 << 28  # bytes
MAX_DEPTH = 100
MAX_VIEWS = 4  # times that the content of a file may appear in different tensors
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two values of files of torch before 1.6
CHUNK = 1 << 22
INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}  # behind quantized numbers


class NotPlainError(SmartpruneError):
    """A file that holds more than tensors and plain values, or whose pickle is damaged."""


def read_torch_file(path: Path, checksums: bool = False) -> object:
    """The tensors and plain values in a file of ``torch.save``.

    With ``checksums``, the checksums in the file are compared with its content. Raises :class:`NotPlainError` for other objects,
    OSError if the file cannot be read, and SmartpruneError for any other damage.
    """
    with open_regular(path) as file:
        return parse_torch_file(file, str(path), checksums)


def parse_torch_file(file: BinaryIO, where: str, checksums: bool = False) -> object:
    """Like :func:`read_torch_file`, for an open file."""
    try:
        start = file.read(4)
        file.seek(0)
        reader = _Archive(file, checksums) if start == b"PK\x03\x04" else _Legacy(file)
        return _Builder(reader).value(reader.content())
    except pickle.UnpicklingError as error:
        raise NotPlainError(f"{where}: holds more than plain tensors, or is damaged ({_first_line(error)})") from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # from the system
            raise
        raise SmartpruneError(f"{where}: not a readable torch checkpoint ({_first_line(error)})") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise SmartpruneError(f"{where}: not a readable torch checkpoint ({_first_line(error)})") from None


class _Reader(ABC):
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.pickled = file, file_size(file), 0

    @abstractmethod
    def content(self) -> object:
        """The content of the pickle."""

    @abstractmethod
    def numbers(self, storage: Storage) -> Tensor:
        """The bytes of a storage, uint8."""

    def unpickle(self, stream: io.BytesIO) -> tuple[object, dict[object, Storage]]:
        unpickler = Unpickler(stream)
        self.pickled += unpickler.size
        return unpickler.load(), unpickler.storages

    def read(self, start: int, size: int) -> Tensor:
        """Bytes of the file, in memory of torch."""
        if size < 0 or start < 0 or start + size > self.size:
            raise ValueError(f"it claims {size:,} bytes at {start:,}, and has {self.size:,}")
        out = torch.empty(size, dtype=torch.uint8, device="cpu")
        view = memoryview(out.numpy())  # type: ignore[arg-type,unused-ignore]
        self.file.seek(start)
        while len(view):
            count = self.file.readinto(view[:CHUNK])  # type: ignore[attr-defined]
            if not count:
                raise ValueError("it was cut off while it was read")
            view = view[count:]
        return out


class _Archive(_Reader):
    """A zip archive with a pickle and one entry per storage."""

    def __init__(self, file: BinaryIO, checksums: bool) -> None:
        super().__init__(file)
        self.checksums = checksums
        entries = zipfile.ZipFile(file).infolist()
        self.entries = {entry.filename: entry for entry in entries}
        names = [name for name in self.entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(self.entries) != len(entries) or len(names) != 1:
            raise ValueError("it must have one data.pkl, and no entry twice")
        self.folder = names[0].partition("/")[0]
        if f"{self.folder}/constants.pkl" in self.entries:
            raise pickle.UnpicklingError("it is a TorchScript archive")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its entries are compressed; torch does not compress checkpoints")
        if sum(entry.file_size for entry in entries) > self.size:
            raise ValueError("its entries claim more bytes than the file has")
        if f"{self.folder}/byteorder" in self.entries and bytes(self.entry("byteorder").numpy()) != b"little":
            raise ValueError("its numbers are big-endian")
        self.ready: dict[object, Tensor] = {}

    def content(self) -> object:
        if self.entries[f"{self.folder}/data.pkl"].file_size > MAX_PICKLE:
            raise ValueError(f"its pickle has more than {MAX_PICKLE:,} bytes")
        return self.unpickle(io.BytesIO(self.entry("data.pkl").numpy().tobytes()))[0]

    def entry(self, name: str) -> Tensor:
        entry = self.entries.get(f"{self.folder}/{name}")
        if entry is None:
            raise ValueError(f"it has no {name[:40]}")
        self.file.seek(max(entry.header_offset, 0))
        head = self.file.read(30)
        if entry.header_offset < 0 or len(head) < 30 or head[:4] != b"PK\x03\x04":
            raise ValueError("an entry has no header")
        names, extra = struct.unpack("<HH", head[26:])
        data = self.read(entry.header_offset + 30 + names + extra, entry.file_size)
        if self.checksums and zlib.crc32(data.numpy()) != entry.CRC:  # type: ignore[arg-type]
            raise ValueError(f"the checksum of {name[:40]} is wrong")
        return data

    def numbers(self, storage: Storage) -> Tensor:
        if storage.key not in self.ready:
            self.ready[storage.key] = self.entry(f"data/{storage.key}")
        return self.ready[storage.key]


class _Legacy(_Reader):
    """A row of pickles, and the storages behind them."""

    def content(self) -> object:
        head = io.BytesIO(self.file.read(MAX_PICKLE))
        if (self.unpickle(head)[0], self.unpickle(head)[0]) != (MAGIC, PROTOCOL):
            raise ValueError("it does not start like a checkpoint")
        self.unpickle(head)  # the system that wrote the file
        value, storages = self.unpickle(head)
        keys = self.unpickle(head)[0]
        if not isinstance(keys, list) or set(keys) != set(storages) or len(keys) != len(storages):
            raise ValueError("its list of storages is wrong")
        position = head.tell()
        self.ready: dict[object, Tensor] = {}
        for key in keys:
            storage = storages[key]
            if int.from_bytes(self.read(position, 8).numpy().tobytes(), "little") != storage.numel:
                raise ValueError("a storage has another size than described")
            self.ready[key] = self.read(position + 8, storage.numel * storage.dtype.itemsize)
            position += 8 + storage.numel * storage.dtype.itemsize
        return value

    def numbers(self, storage: Storage) -> Tensor:
        return self.ready[storage.key]


class _Builder:
    """Builds tensors from their descriptions."""

    def __init__(self, reader: _Reader) -> None:
        self.reader, self.nodes = reader, 0
        self.tensors: dict[int, Tensor] = {}
        self.views: set[object] = set()
        self.viewed = 0  # bytes of different tensors, which may overlap

    def value(self, value: object, depth: int = MAX_DEPTH) -> Any:
        """A copy of plain data, with tensors in place of their descriptions."""
        self.nodes += 1
        if depth == 0 or self.nodes > value_limit(self.reader.pickled):
            raise ValueError("its values are nested too deeply, or too often")
        if isinstance(value, dict):
            return {self.value(key, depth - 1): self.value(item, depth - 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set)):
            return type(value)(self.value(item, depth - 1) for item in value)
        if isinstance(value, Call):
            if id(value) not in self.tensors:
                self.tensors[id(value)] = self.tensor(value, depth)
            return self.tensors[id(value)]
        if isinstance(value, Name) and (dtype := dtype_of(value.name)) is not None:
            return dtype
        if isinstance(value, Inert):
            raise pickle.UnpicklingError("it holds a function, a type or a storage")
        return value

    def tensor(self, call: Call, depth: int) -> Tensor:
        args = call.args
        match call.name.removeprefix(REBUILD):
            case "tensor" | "tensor_v2" | "tensor_v3" as kind:
                storage, offset, size, stride = args[:4]
                dtype = dtype_of(args[6].name) if kind == "tensor_v3" else storage.dtype
                out = self.strided(storage, dtype, offset, size, stride)
                metadata = args[7:8] if kind == "tensor_v3" else args[6:7]
                return _with_metadata(out, metadata[0] if metadata else None)
            case "qtensor":
                return self.quantized(args, depth)
            case "sparse_tensor":
                return self.sparse(args[0], args[1], depth)
            case "meta_tensor_no_storage":
                dtype, size, stride = args[:3]
                return torch.empty_strided(size, stride, dtype=dtype_of(dtype.name), device="meta")
            case "parameter" | "parameter_with_state":
                inner = args[0]
            case _:  # a tensor with attributes, which are not kept
                function, kind, inner = args[0], args[1], args[2]
                if not isinstance(kind, Name) or kind.name not in TYPES or not isinstance(function, Name):
                    raise pickle.UnpicklingError("it holds a subclass of torch.Tensor")
                inner = Call(function.name, inner)
        out = self.value(inner, depth - 1)
        if not isinstance(out, Tensor):
            raise ValueError("a parameter is not a tensor")
        return out

    def strided(self, storage: Storage, dtype: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        numbers = self.reader.numbers(storage)
        if numbers.numel() != storage.numel * storage.dtype.itemsize:
            raise ValueError("a storage has another size than described")
        if not _are_sizes(size) or not _are_sizes(stride) or len(size) != len(stride) or not _are_sizes((offset,)):
            raise ValueError("a tensor has a shape that no tensor has")
        start, stop = (x * storage.dtype.itemsize for x in (storage.start, storage.start + storage.count))
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if start + (offset if 0 in size else last + 1) * dtype.itemsize > stop:
            raise ValueError(f"a tensor claims {math.prod(size):,} numbers, and the file stores fewer; the file is damaged")
        if start % dtype.itemsize:
            raise ValueError("a tensor does not start at a number")
        self.check_views((storage.key, start, offset, size, stride, dtype), math.prod(size) * dtype.itemsize)
        out = torch.empty(0, dtype=dtype, device="cpu")
        return out.set_(numbers.untyped_storage(), start // dtype.itemsize + offset, size, stride)

    def check_views(self, view: object, size: int) -> None:
        """Raises if different tensors share the same bytes again and again: work on them would take far longer than on the file."""
        self.viewed += 0 if view in self.views else size
        self.views.add(view)
        if self.viewed > FREE_BYTES + MAX_VIEWS * self.reader.size:
            raise ValueError(
                f"its tensors claim {self.viewed:,} bytes, and the file has {self.reader.size:,}; it may be damaged or hostile"
            )

    def quantized(self, args: Sequence[Any], depth: int) -> Tensor:
        storage, offset, size, stride, parameters = args[:5]
        numbers = self.strided(storage, INTEGERS[storage.dtype], offset, size, stride)
        scale, zero_point, *axis = (self.value(item, depth - 1) for item in parameters[1:])
        if "per_tensor" in parameters[0].name:
            return torch._make_per_tensor_quantized_tensor(numbers, scale, zero_point)
        if not 0 <= axis[0] < len(size) or scale.shape != (size[axis[0]],) or zero_point.shape != scale.shape:
            raise ValueError("the scales of a quantized tensor do not fit its shape")
        return torch._make_per_channel_quantized_tensor(numbers, scale, zero_point, axis[0])

    def sparse(self, layout: object, data: Sequence[Any], depth: int) -> Tensor:
        parts = [self.value(item, depth - 1) for item in data]
        if layout is torch.sparse_coo:
            indices, values, size = parts[:3]
            return torch.sparse_coo_tensor(indices, values, size, check_invariants=True)
        if layout not in COMPRESSED:
            raise ValueError(f"it has the layout {layout}")
        rows, columns, values, size = parts
        return torch.sparse_compressed_tensor(rows, columns, values, size, layout=layout, check_invariants=True)


def _are_sizes(values: object) -> bool:
    return isinstance(values, tuple) and len(values) <= 64 and all(type(x) is int and 0 <= x < 2**62 for x in values)


def _with_metadata(tensor: Tensor, metadata: object) -> Tensor:
    """Complex numbers that are stored as their conjugates, or numbers that are stored negated."""
    if not isinstance(metadata, Mapping):
        return tensor
    if metadata.get("conj") is True:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if metadata.get("neg") is True else tensor


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
