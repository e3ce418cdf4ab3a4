"""Damaged and hostile packed files are refused, or read exactly as the documentation says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import smartprune as sp
from helpers import zoo
from helpers.packed_files import documented_example, documented_reader, raw_bytes, zero_random_blocks
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.packfile import KEY

ROUNDS = 2600  # for each of the files below
HOSTILE: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**63, 2**64, 2**200, 1.5, -0.0, 1e308, True, False, None),
    *("", "x", "F32", "I8", "F8_E4M3", "\x00", "é" * 50, "16x8x1x1", "4x4x1x1", "*x*", "sha256:" + "0" * 64),
    *([], {}, [0], [1, 1], [-1, -1], [2**40, 2**40], [4, 4, 1, 1], [0, 2**63], [[]] * 5, {"a": "b"}, {"": ""}),
]


def split_file(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header, its metadata, and the data."""
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    return header, json.loads(header["__metadata__"][KEY]), data[stop:]


def join_file(header: dict[str, Any], text: object, body: bytes) -> bytes:
    header["__metadata__"] = {KEY: text if isinstance(text, str) else json.dumps(text)}
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def list_places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in plain data."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *list_places(value[key]))]


def edit(value: Any, rng: random.Random) -> None:
    """Changes, drops, copies or swaps one value at a random place in plain data."""
    places = list_places(value)
    if not places:
        return
    (container, key), (other, other_key) = rng.choice(places), rng.choice(places)
    kind = rng.random()
    if kind < 0.5:
        container[key] = rng.choice(HOSTILE)
    elif kind < 0.6:
        del container[key]
    elif kind < 0.7 and type(container[key]) is int:
        container[key] += rng.choice((-1, 1, 16))
    elif kind < 0.8 and isinstance(container, dict):
        container[rng.choice(("extra", "__metadata__", "conv.weight"))] = container[key]
    elif container is other:
        container[key], container[other_key] = container[other_key], container[key]
    else:
        container[key] = json.loads(json.dumps(other[other_key]))


def mutate(good: bytes, rng: random.Random) -> tuple[str, bytes]:
    data = bytearray(good)
    start = 8 + int.from_bytes(good[:8], "little")
    kind = rng.choice(("flip", "head", "cut", "grow", "length", "metadata", "metadata", "tensors", "swap", "index", "payload"))
    if kind in ("flip", "head"):
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data) if kind == "flip" else start)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "grow":
        at = rng.choice((0, 8, start, len(data), rng.randrange(len(data))))
        data[at:at] = rng.randbytes(rng.choice((1, 4, 64)))
    elif kind == "length":
        data[:8] = rng.choice((0, 1, start - 9, start, 2**31, 2**63, 2**64 - 1, rng.randrange(len(data)))).to_bytes(8, "little")
    elif kind == "payload":
        data[rng.randrange(start, len(data))] = rng.randrange(256)
    else:
        header, text, body = split_file(good)
        header.pop("__metadata__")
        if kind == "metadata":
            for _ in range(rng.choice((1, 1, 2))):
                edit(text, rng)
        elif kind == "tensors":
            edit(header, rng)
        elif kind == "swap":  # of two tensors
            one, two = rng.sample(sorted(header), 2)
            field = rng.choice(("shape", "data_offsets", "dtype"))
            header[one][field], header[two][field] = header[two][field], header[one][field]
        else:  # a wrong index
            name = rng.choice([name for name in header if name.endswith(("#rows", "#cols"))])
            first, last = header[name]["data_offsets"]
            if last > first:
                at = rng.randrange(first, last, 4)
                number = rng.choice((-1, 0, 1, 2, 3, 99, 2**31 - 1, -(2**31), rng.randrange(300)))
                body = body[:at] + number.to_bytes(4, "little", signed=True) + body[at + 4 :]
        return kind, join_file(header, text, body)
    return kind, bytes(data)


def packed_files(tmp_path: Path) -> dict[str, bytes]:
    torch.manual_seed(0)
    sp.pack(documented_example(), tmp_path / "example", (2, 2))
    sp.pack(zero_random_blocks(zoo.tied()[0], (4, 4)), tmp_path / "tied", (4, 4))
    sp.pack(zero_random_blocks(zoo.mobilenet_block()[0], (4, 4)).half(), tmp_path / "grouped", (4, 4))
    model, receipt = model_and_receipt("unet")
    sp.pack(model, tmp_path / "transposed", receipt=receipt)
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["example", "tied", "grouped", "transposed"])
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """More than 10,000 files in total. Accepted files have the declared shapes and read the same with the documented reader."""
    good = packed_files(tmp_path)[name]
    path, reader = tmp_path / "mutant", documented_reader()
    path.write_bytes(good)
    original = sp.unpack(path)
    rng = random.Random(name)
    accepted: dict[str, int] = {}
    refused: dict[str, int] = {}
    for _ in range(ROUNDS):
        kind, data = mutate(good, rng)
        path.unlink()  # much faster than truncating the old file
        path.write_bytes(data)
        try:
            unpacked = sp.unpack(path)
        except sp.SmartpruneError as error:
            if "mutant" not in str(error):
                raise
            refused[kind] = refused.get(kind, 0) + 1
            continue
        accepted[kind] = accepted.get(kind, 0) + 1
        if kind == "payload":
            assert {key: (tensor.shape, tensor.dtype) for key, tensor in unpacked.items()} == {
                key: (tensor.shape, tensor.dtype) for key, tensor in original.items()
            }
        with np.errstate(all="ignore"):
            for key, array in reader(path).items():
                assert array.shape == tuple(unpacked[key].shape)
                assert array.tobytes() == raw_bytes(unpacked[key]).tobytes(), (kind, key)
    assert sum(refused.values()) > 0.5 * ROUNDS
    assert accepted["payload"] > 50  # a file with a changed value is valid
    assert not {"cut", "grow", "length"} & accepted.keys()  # files with missing or extra bytes are refused
    assert refused["index"] > 20
    assert {"metadata", "tensors", "swap", "head", "flip"} <= refused.keys()


# --- one error at a time, and its message


def write_damaged(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "bad"
    sp.pack(documented_example(), path, (2, 2))
    header, text, body = split_file(path.read_bytes())
    header.pop("__metadata__")
    body = change(header, text, bytearray(body)) or body
    path.write_bytes(join_file(header, text, bytes(body)))
    return path


def write_numbers(at: int, *numbers: int) -> Any:
    """Writes 32-bit numbers into the data: the bias is at 0, cols at 12, rows at 24, values at 36."""

    def change(header: Any, text: Any, body: bytearray) -> bytearray:
        for i, number in enumerate(numbers):
            body[at + 4 * i : at + 4 * i + 4] = number.to_bytes(4, "little", signed=True)
        return body

    return change


def change_entry(**values: Any) -> Any:
    return lambda header, text, body: text["weights"][0].update(values)


def change_metadata(**values: Any) -> Any:
    return lambda header, text, body: text.update(values)


DAMAGES = {
    "version": (change_metadata(version=2), r"version is 2; it must be 1; a newer"),
    "boolean version": (change_metadata(version=True), r"version is True"),
    "edge": (change_metadata(edge="crop"), r"edge is 'crop'; it must be 'pad'"),
    "block": (change_metadata(block="0x2"), r"block \(0, 2\) must have"),
    "block in another notation": (change_metadata(block="2x2"), r"block is '2x2'; it must be '2x2x1x1'"),
    "unknown key": (change_metadata(more=1), r"unknown key 'more'"),
    "names": (change_metadata(names=["conv.weight"]), r"names is .*every tensor of the file"),
    "names twice": (change_metadata(names=["conv.weight", "conv.bias", "conv.bias"]), r"without repetition"),
    "tied to nothing": (change_metadata(tied={"conv.x": "conv.y"}, names=["conv.weight", "conv.bias", "conv.x"]), r"names is"),
    "tied in a circle": (change_metadata(tied={"a": "b", "b": "a"}), r"tied is"),
    "hash": (change_metadata(mask_hash="sha256:" + "0" * 64), r"the hash of the kept blocks is sha256:bb1c"),
    "receipt": (change_metadata(receipt={"format": 9}), r"receipt: format is 9"),
    "shape": (change_entry(shape=[3, 4, 1, 3]), r"kernel is a list of 2; it must be \[1, 3\]"),
    "negative shape": (change_entry(shape=[3, -4, 1, 2]), r"weights\[0\]: shape is"),
    "overflowing shape": (change_entry(shape=[2**40, 2**40, 1, 2]), r"weights\[0\]: shape is"),
    "groups": (change_entry(groups=2), r"cannot be divided into 2 groups"),
    "axes": (change_entry(transposed=True), r"output_axis is 0; it must be 1"),
    "dtype": (change_entry(dtype="F128"), r"dtype is 'F128'; it must be one of F64"),
    "other dtype": (change_entry(dtype="F16"), r"conv\.weight#values is F32 \[3, 1, 1, 2, 2\]; it must be F16"),
    "count": (change_entry(blocks=2), r"conv\.weight#cols is I32 \[3\]; it must be I32 \[2\]"),
    "too many": (change_entry(blocks=9), r"blocks is 9; it must be an integer from 0 to 8"),
    "stored as dense": (change_entry(blocks=None), r"there is no tensor of that name"),
    "name": (change_entry(name="conv.bias"), r"conv\.bias#rows is missing"),
    "rows fall": (write_numbers(24, 0, 4, 3), r"conv\.weight#rows must start at 0, never fall, and end at 3"),
    "rows start": (write_numbers(24, 1, 2, 3), r"#rows must start"),
    "rows end": (write_numbers(24, 0, 2, 2), r"#rows must start"),
    "rows negative": (write_numbers(24, 0, -2, 3), r"#rows must start"),
    "cols out of range": (write_numbers(12, 1, 2, 4), r"conv\.weight#cols must increase within each row and stay below 4"),
    "cols negative": (write_numbers(12, -1, 2, 3), r"#cols must"),
    "cols fall": (write_numbers(12, 2, 1, 3), r"#cols must"),
    "cols twice": (write_numbers(12, 1, 1, 3), r"#cols must"),
    "another kept block": (write_numbers(12, 0, 2, 3), r"the hash of the kept blocks is"),
    "rows moved": (write_numbers(24, 0, 3, 3), r"the hash of the kept blocks is"),
    "a block of zeros": (write_numbers(36 + 16, 0, 0, 0, 0), r"#values holds a block of zeros"),
    "padding": (write_numbers(36 + 44, 1), r"#values holds more than zeros beyond the edge"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_every_check_has_its_message(case: str, tmp_path: Path) -> None:
    change, message = DAMAGES[case]
    path = write_damaged(tmp_path, change)
    for read in (sp.unpack, sp.verify, sp.report):
        with pytest.raises(sp.SmartpruneError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_a_small_file_that_claims_a_terabyte_is_refused(tmp_path: Path) -> None:
    """The file is refused before such a tensor is allocated. ``limit`` changes the threshold."""
    side = 2**19
    text = {
        **{"version": 1, "block": "*x*x1x1", "edge": "pad", "names": ["w"], "tied": {}, "receipt": None},
        "mask_hash": "sha256:" + "0" * 64,
    }
    weight = {"name": "w", "layer": "w", "kind": "matrix", "dtype": "F32", "shape": [side, side], "kernel": [], "groups": 1}
    weight |= {"transposed": False, "output_axis": 0, "input_axis": 1, "block": [side, side], "rows": 1, "columns": 1, "blocks": 0}
    header = {
        "w#rows": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
        "w#cols": {"dtype": "I32", "shape": [0], "data_offsets": [8, 8]},
        "w#values": {"dtype": "F32", "shape": [0, side, side], "data_offsets": [8, 8]},
    }
    path = tmp_path / "small"
    path.write_bytes(join_file(header, {**text, "weights": [weight]}, b"\0" * 8))
    for read in (sp.unpack, sp.verify):
        with pytest.raises(
            sp.SmartpruneError, match=r"small: the weights up to w take 1,099,511,627,776 bytes when unpacked, and the limit is"
        ):
            read(path)
    sp.pack({"w": torch.zeros(64, 64), "v": torch.zeros(64, 64)}, path, (4, 4))
    assert sp.unpack(path, limit=2 * 4 * 64 * 64)["w"].shape == (64, 64)
    with pytest.raises(sp.SmartpruneError, match="give a larger limit="):
        sp.unpack(path, limit=2 * 4 * 64 * 64 - 1)


def test_odd_metadata_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    sp.pack(documented_example(), path, (2, 2))
    header, text, body = split_file(path.read_bytes())
    header.pop("__metadata__")
    for wrong in ("", "{", "[]", "null", "3", '"x"', '{"version": NaN}', "[" * 100_000, '{"version":1,"version":1}', "\x00"):
        path.write_bytes(join_file(dict(header), wrong, body))
        with pytest.raises(sp.SmartpruneError, match=r"odd: smartprune\.packed"):
            sp.unpack(path)
    header["__metadata__"] = {KEY: json.dumps(text), "other": "metadata of another tool"}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    assert sp.unpack(path)["conv.weight"].equal(documented_example()["conv.weight"])
    with pytest.raises(sp.SmartpruneError, match="not a readable safetensors file"):
        sp.unpack(Path(__file__))
