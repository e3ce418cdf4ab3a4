"""Files of torch.save: the same content as torch.load returns, and refused if they are damaged or hostile."""

from __future__ import annotations

import collections
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.artifacts.torch_file import NotPlainError, parse_torch_file

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*[qQ]uantized:UserWarning", "ignore:Sparse CSR:UserWarning", "ignore:.*TypedStorage"
)


def contents(legacy: bool = False) -> dict[str, Any]:
    """What people store in checkpoints. Legacy files lack some types."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    base = torch.arange(24.0)
    return {
        "state dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": nn.Parameter(torch.randn(3)),
        "buffer": nn.Buffer(torch.randn(3)),
        "views of one storage": [base[3:], base.reshape(4, 6).t(), base[::5], base.expand(3, 24)],
        "dtypes": [torch.arange(4).to(dtype) for dtype in (*DTYPES, *(() if legacy else NEW_DTYPES))],
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.randn(3)),
        "empty": [torch.empty(0), torch.empty(3, 0), torch.tensor(7)],
        "meta": torch.empty(3, device="meta"),
        "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()],
        "quantized": [
            torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 2, torch.quint8),
            torch.quantize_per_channel(torch.randn(3, 2), torch.rand(3) + 1, torch.zeros(3), 0, torch.qint8),
        ],
        "plain": [1, -(2**70), 2.5, "text", b"bytes", None, True, 1j, (1, (2,)), {1, 2}, collections.Counter("aab")],
        "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
        "nested": {"a": {"b": [{"c": torch.ones(2)}]}},
    }


DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.bool,
)
NEW_DTYPES = (torch.uint16, torch.float8_e4m3fn)


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.layout) == (expected.dtype, expected.shape, expected.layout)
        if expected.is_meta:
            assert actual.is_meta
        elif expected.is_quantized:
            assert actual.qscheme() == expected.qscheme()
            assert torch.equal(actual.dequantize(), expected.dequantize())
        elif expected.layout is torch.strided:
            assert actual.stride() == expected.stride()
            assert (actual.is_conj(), actual.is_neg()) == (expected.is_conj(), expected.is_neg())
            one, other = (x.resolve_conj().resolve_neg().reshape(-1).contiguous() for x in (actual, expected))
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            assert torch.equal(actual.to_dense(), expected.to_dense())
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected
        assert type(actual) is type(expected)


@pytest.mark.parametrize("options", [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}], ids=str)
def test_the_content_is_that_of_torch_load(options: dict[str, Any]) -> None:
    for key, value in contents(legacy="_use_new_zipfile_serialization" in options).items():
        file = io.BytesIO()
        torch.save(value, file, **options)
        file.seek(0)
        expected = torch.load(file, weights_only=False)
        file.seek(0)
        assert_same(parse_torch_file(file, key), expected)


def test_tensors_of_one_storage_share_it() -> None:
    base, file = torch.arange(6.0), io.BytesIO()
    torch.save({"a": base, "b": base[2:], "c": base}, file)
    file.seek(0)
    state: Any = parse_torch_file(file, "file")
    state["a"][3] = 9
    assert state["b"][1] == state["c"][3] == 9


# --- hostile files


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def archive(pickled: bytes, records: dict[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        for key, value in {"data.pkl": pickled, "version": b"3\n", **(records or {})}.items():
            file.writestr(f"archive/{key}", value)
    return out.getvalue()


def state_of(value: bytes) -> bytes:
    """The pickle of ``{"w": value}``."""
    return b"\x80\x02}" + text("w") + value + b"s."


def call(function: str, *args: bytes) -> bytes:
    return name(function) + b"(" + b"".join(args) + b"tR"


def tensor(numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], kind: str = "torch.FloatStorage") -> bytes:
    storage = b"(" + text("storage") + name(kind) + text("0") + text("cpu") + number(numel) + b"tQ"
    shape = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (size, stride))
    return call("torch._utils._rebuild_tensor_v2", storage, number(offset), shape, b"\x89", call("collections.OrderedDict"))


def tensor_file(*args: Any, record: bytes = bytes(16)) -> bytes:
    return archive(state_of(tensor(*args)), {"data/0": record})


def doubled(times: int) -> bytes:
    """Lists that hold another list twice: 2 ** times values."""
    return b"]q\x01" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(1, times + 1))


HUGE = 3 * 2**30
HOSTILE = {
    "bytearray": archive(state_of(name("builtins.bytearray") + number(HUGE) + b"\x85R")),
    "bytearray operation": archive(state_of(b"\x96" + struct.pack("<Q", HUGE))),
    "memo": archive(state_of(b"]r" + struct.pack("<I", 2**31))),
    "storage": archive(state_of(call("torch.storage.UntypedStorage", number(HUGE)))),
    "tensor by size": archive(state_of(call("torch.Tensor", number(HUGE)))),
    "quantized": archive(state_of(call("torch._utils._rebuild_nested_tensor"))),
    "larger storage": tensor_file(HUGE, 0, (HUGE,), (1,)),
    "smaller storage": tensor_file(3, 0, (3,), (1,)),
    "larger tensor": tensor_file(4, 0, (HUGE,), (1,)),
    "offset": tensor_file(4, 4, (1,), (1,)),
    "negative offset": tensor_file(4, -1, (1,), (1,)),
    "negative stride": tensor_file(4, 3, (2,), (-1,)),
    "wide stride": tensor_file(4, 0, (2, 2), (1, 3)),
    "overflow": tensor_file(4, 0, (2, 2**61), (2**61, 8)),
    "no such record": archive(state_of(tensor(4, 0, (4,), (1,)))),
    "compressed": archive(state_of(b"N"), {"data/0": bytes(10**6)}, zipfile.ZIP_DEFLATED),
    "copies of a text": archive(
        state_of(b"(" + text("a" * 100_000) + b"q\x010" + call("_codecs.encode", b"h\x01", text("latin1")) * 1000 + b"l")
    ),
    "values twice": archive(state_of(doubled(60))),
    "deep": archive(state_of(b"(" * 10_000 + b"t" * 10_000)),
    "a function as value": archive(state_of(name("_codecs.encode"))),
    "attributes of a function": archive(
        state_of(name("_codecs.encode") + b"N}" + text("name") + text("builtins.bytearray") + b"s\x86b(" + number(HUGE) + b"tR")
    ),
    "attributes of a dictionary": archive(b"\x80\x02" + call("collections.OrderedDict") + b"}" + text("items") + b"Nsb."),
    "two pickles": archive(state_of(b"N"), {"../other/data.pkl": state_of(b"N")}),
    "script": archive(state_of(b"N"), {"constants.pkl": b""}),
    "no number": tensor_file(4, 0, (4,), (1,)).replace(b"FloatStorage", b"FloatStorahe"),
    "cut": tensor_file(4, 0, (4,), (1,))[:-40],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(sp.SmartpruneError, match=r"bad\.pt"):
        sp.verify(path, (1, 1))


def test_a_legacy_file_cannot_claim_more_than_it_holds() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.arange(1000.0)}, file, _use_new_zipfile_serialization=False)
    good = file.getvalue()
    assert parse_torch_file(io.BytesIO(good), "file")["w"].sum() == 499500  # type: ignore[index]
    claimed = good.replace(struct.pack("<H", 1000), struct.pack("<H", 60000))
    assert claimed != good
    for data in (claimed, good[:-1], good.replace(b"FloatStorage", b"LongStorage\n")):
        with pytest.raises(sp.SmartpruneError):
            parse_torch_file(io.BytesIO(data), "file")


def test_objects_are_not_plain() -> None:
    for value in (nn.Linear(2, 2), {"f": os.getcwd}, {"path": Path("x")}):
        for zipped in (True, False):
            file = io.BytesIO()
            torch.save(value, file, _use_new_zipfile_serialization=zipped)
            file.seek(0)
            with pytest.raises(NotPlainError, match="holds more than plain tensors"):
                parse_torch_file(file, "file")


def test_checksums_are_compared_on_request() -> None:
    file = io.BytesIO()
    torch.save({"w": torch.arange(1000.0)}, file)
    data = bytearray(file.getvalue())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 40] ^= 1
    parse_torch_file(io.BytesIO(data), "file")
    with pytest.raises(sp.SmartpruneError, match=r"the checksum of data/0 is wrong"):
        parse_torch_file(io.BytesIO(data), "file", checksums=True)
