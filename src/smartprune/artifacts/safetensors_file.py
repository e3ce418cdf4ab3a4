"""Writes safetensors files with aligned data, and checks the header of files that are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import SmartpruneError
from ..fields import Fields
from ..files import check_readable, parse_json

METADATA = "__metadata__"  # reserved: no tensor can have this name
MASK = "smartprune.mask"  # the metadata entry of mask files
ALIGNMENT = 64  # bytes
MAX_TEXT = 1 << 26  # characters of the metadata
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
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def read_safetensors(path: Path) -> tuple[int, Mapping[str, str], dict[str, Tensor]]:
    """The size of a file, its metadata and copies of its tensors. The file is not trusted."""
    check_readable(path)
    try:
        size = path.stat().st_size
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # the library has no common error type
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise SmartpruneError(f"{path}: not a readable safetensors file ({first})") from None
    check_header(path)
    return size, metadata or {}, tensors


def read_entry(metadata: Mapping[str, str], key: str, where: str) -> Fields:
    """The JSON text of one metadata entry."""
    if len(metadata[key]) > MAX_TEXT:
        raise SmartpruneError(f"{where}: {key} is longer than {MAX_TEXT:,} characters; the file is damaged or hostile")
    return Fields(parse_json(metadata[key], f"{where}: {key}"), f"{where}: {key}")


def check_header(path: Path) -> None:
    """Raises if two entries of the header have the same name, because readers differ in which one they take. The size of the
    header was checked when the file was opened."""
    with path.open("rb") as file:
        parse_json(file.read(int.from_bytes(file.read(8), "little")), f"{path}: header")


def dtype_code(name: str, tensor: Tensor) -> str:
    """The name of a tensor's dtype in a file."""
    if tensor.dtype not in CODES:
        raise SmartpruneError(f"{name}: {tensor.dtype} cannot be stored; it can be {', '.join(DTYPES)}")
    return CODES[tensor.dtype]


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """A safetensors file, in pieces. The same tensors always give the same bytes.

    The safetensors library guarantees neither order nor alignment. Here the data starts at a multiple of 64 bytes, and tensors
    whose size is a multiple of 64 come first.
    """
    order = sorted(tensors, key=lambda name: (tensor_bytes(tensors[name]) % ALIGNMENT != 0, -tensors[name].element_size(), name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name in order:
        tensor = tensors[name]
        code = dtype_code(name, tensor)
        stop = start + tensor_bytes(tensor)
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield as_integers(tensors[name].detach().cpu().contiguous()).numpy().tobytes()


def safetensors_size(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """The size of a file with these tensors, in bytes, without making it."""
    by_name = dict(tensors)
    header = next(safetensors_bytes({name: tensor.detach() for name, tensor in by_name.items()}))
    return len(header) + sum(map(tensor_bytes, by_name.values()))


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers, so that moving them changes none."""
    return tensor.view(INTEGERS[tensor.element_size()])
