"""Reads the pickles in files of ``torch.save`` into plain values and descriptions. Nothing that a pickle names is called."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ..pickles import check_operations, value_limit

ITEM_BYTES = 8  # of a list
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "UntypedStorage": torch.uint8,  # the tensor says how its bytes are read
}
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, *COMPRESSED)}
SCHEMES = ("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric")
REBUILD = "torch._utils._rebuild_"
TENSORS = ("tensor", "tensor_v2", "tensor_v3", "qtensor", "sparse_tensor", "meta_tensor_no_storage")
CALLS = {
    *("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.complex", "_codecs.encode", "torch.Size"),
    *("torch.device", "torch.serialization._get_layout", "torch._tensor._rebuild_from_type_v2"),
    *(REBUILD + name for name in (*TENSORS, "parameter", "parameter_with_state")),
}
TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")


class Inert:
    """Something in a pickle that the pickle cannot change."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None: ...


class _Dict(dict[Any, Any]):
    """A dictionary without attributes, in place of an OrderedDict."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None: ...


class Name(Inert):
    """A function, a type or a constant. Its calls are described, and happen only if they are harmless."""

    __slots__ = ("name", "unpickler")

    def __init__(self, name: str, unpickler: Unpickler) -> None:
        self.name, self.unpickler = name, unpickler

    def __call__(self, *args: Any) -> object:
        return self.unpickler.call(self.name, args)


class Call(Inert):
    """A tensor to build."""

    __slots__ = ("args", "name")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args


class Storage(Inert):
    """Stored numbers. ``start`` and ``count`` are in numbers of type ``dtype``."""

    __slots__ = ("count", "dtype", "key", "numel", "start")

    def __init__(self, dtype: torch.dtype, key: object, numel: int, start: int, count: int) -> None:
        self.dtype, self.key, self.numel, self.start, self.count = dtype, key, numel, start, count


class Unpickler(pickle.Unpickler):
    """Reads one pickle of a stream into plain values and descriptions."""

    def __init__(self, stream: io.BytesIO) -> None:
        start = stream.tell()
        check_operations(stream)
        self.size = stream.tell() - start
        stream.seek(start)
        self.copied = 0  # bytes, by calls
        self.storages: dict[object, Storage] = {}
        super().__init__(stream, encoding="utf-8")

    def find_class(self, module: str, name: str) -> Name:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        known = full in CALLS or full in TYPES or (module == "torch" and name in SCHEMES)
        if not (known or dtype_of(full) is not None or (module in ("torch", "torch.cuda", "torch.storage") and name in STORAGES)):
            raise pickle.UnpicklingError(f"it refers to {full}")
        return Name(full, self)

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage_type, key, _, numel, *view = pid
        name = storage_type.name.rpartition(".")[2] if isinstance(storage_type, Name) else ""
        if kind not in ("storage", b"storage") or name not in STORAGES or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("a storage is described wrongly")
        _, start, count = (None, 0, numel) if not view or view[0] is None else view[0]
        if type(start) is not int or type(count) is not int or start < 0 or count < 0 or start + count > numel:
            raise ValueError("a view reaches beyond its storage")
        storage = Storage(STORAGES[name], key, numel, start, count)
        self.storages[key] = storage
        return storage

    def call(self, name: str, args: tuple[Any, ...]) -> object:
        self.copied += sum(len(x) for x in args if isinstance(x, (str, bytes)))
        self.copied += sum(ITEM_BYTES * len(x) for x in args if isinstance(x, (list, tuple, dict, set)))
        if self.copied > value_limit(self.size):
            raise ValueError("it copies its values again and again")
        match name:
            case "collections.OrderedDict" | "collections.Counter":
                return _Dict(*args)
            case "builtins.set":
                return set(*args)
            case "builtins.complex":
                return complex(*args)
            case "_codecs.encode":
                return str(args[0]).encode("latin1")
            case "torch.Size":
                return tuple(*args)
            case "torch.device":
                return torch.device(*args)
            case "torch.serialization._get_layout":
                return LAYOUTS[args[0]]
            case _ if name in CALLS:
                return Call(name, args)
        raise pickle.UnpicklingError(f"it calls {name}")


def dtype_of(name: str) -> torch.dtype | None:
    value = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return value if isinstance(value, torch.dtype) else None
