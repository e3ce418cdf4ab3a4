"""Packed files that nobody vouches for: damaged and hostile ones are refused, or read exactly as the documentation says."""

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


def split(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header, the metadata in it, and the data."""
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    return header, json.loads(header["__metadata__"][KEY]), data[stop:]


def join(header: dict[str, Any], text: object, body: bytes) -> bytes:
    header["__metadata__"] = {KEY: text if isinstance(text, str) else json.dumps(text)}
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + body


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in plain data."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def edit(value: Any, rng: random.Random) -> None:
    """Changes, drops, copies or swaps something anywhere in plain data."""
    spots = places(value)
    if not spots:
        return
    (box, key), (other, at) = rng.choice(spots), rng.choice(spots)
    kind = rng.random()
    if kind < 0.5:
        box[key] = rng.choice(HOSTILE)
    elif kind < 0.6:
        del box[key]
    elif kind < 0.7 and type(box[key]) is int:
        box[key] += rng.choice((-1, 1, 16))
    elif kind < 0.8 and isinstance(box, dict):
        box[rng.choice(("extra", "__metadata__", "conv.weight"))] = box[key]
    elif box is other:
        box[key], box[at] = box[at], box[key]
    else:
        box[key] = json.loads(json.dumps(other[at]))


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
        header, text, body = split(good)
        header.pop("__metadata__")
        if kind == "metadata":
            for _ in range(rng.choice((1, 1, 2))):
                edit(text, rng)
        elif kind == "tensors":
            edit(header, rng)
        elif kind == "swap":  # lengths, places, types
            one, two = rng.sample(sorted(header), 2)
            field = rng.choice(("shape", "data_offsets", "dtype"))
            header[one][field], header[two][field] = header[two][field], header[one][field]
        else:  # an index that points elsewhere
            name = rng.choice([name for name in header if name.endswith(("#rows", "#cols"))])
            first, last = header[name]["data_offsets"]
            if last > first:
                at = rng.randrange(first, last, 4)
                number = rng.choice((-1, 0, 1, 2, 3, 99, 2**31 - 1, -(2**31), rng.randrange(300)))
                body = body[:at] + number.to_bytes(4, "little", signed=True) + body[at + 4 :]
        return kind, join(header, text, body)
    return kind, bytes(data)


def files(tmp_path: Path) -> dict[str, bytes]:
    torch.manual_seed(0)
    sp.pack(documented_example(), tmp_path / "example", (2, 2))
    sp.pack(zero_random_blocks(zoo.tied()[0], (4, 4)), tmp_path / "tied", (4, 4))
    sp.pack(zero_random_blocks(zoo.mobilenet_block()[0], (4, 4)).half(), tmp_path / "grouped", (4, 4))
    model, receipt = model_and_receipt("unet")
    sp.pack(model, tmp_path / "transposed", receipt=receipt)
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["example", "tied", "grouped", "transposed"])
def test_mutated_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """More than 10,000 in all. What is accepted has the shapes it declares and says the same to an independent reader."""
    good = files(tmp_path)[name]
    path, reader = tmp_path / "mutant", documented_reader()
    path.write_bytes(good)
    original = sp.unpack(path)
    rng = random.Random(name)
    accepted: dict[str, int] = {}
    refused: dict[str, int] = {}
    for _ in range(ROUNDS):
        kind, data = mutate(good, rng)
        path.unlink()  # far quicker than to cut the old one off
        path.write_bytes(data)
        try:
            got = sp.unpack(path)
        except sp.SmartpruneError as error:
            if "mutant" not in str(error):  # the message says which file
                raise
            refused[kind] = refused.get(kind, 0) + 1
            continue
        accepted[kind] = accepted.get(kind, 0) + 1
        if kind == "payload":
            assert {key: (tensor.shape, tensor.dtype) for key, tensor in got.items()} == {
                key: (tensor.shape, tensor.dtype) for key, tensor in original.items()
            }
        with np.errstate(all="ignore"):
            for key, array in reader(path).items():
                assert array.shape == tuple(got[key].shape)
                assert array.tobytes() == raw_bytes(got[key]).tobytes(), (kind, key)
    assert sum(refused.values()) > 0.5 * ROUNDS
    assert accepted["payload"] > 50  # a changed number is another model, not a damaged file
    assert not {"cut", "grow", "length"} & accepted.keys()  # nothing may be missing or left over
    assert refused["index"] > 20
    assert {"metadata", "tensors", "swap", "head", "flip"} <= refused.keys()


# --- one wrong thing at a time, and what is said about it


def spoiled(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "bad"
    sp.pack(documented_example(), path, (2, 2))
    header, text, body = split(path.read_bytes())
    header.pop("__metadata__")
    body = change(header, text, bytearray(body)) or body
    path.write_bytes(join(header, text, bytes(body)))
    return path


def put(at: int, *numbers: int) -> Any:
    """Writes 32-bit numbers into the data: the bias is at 0, cols at 12, rows at 24, values at 36."""

    def change(header: Any, text: Any, body: bytearray) -> bytearray:
        for i, number in enumerate(numbers):
            body[at + 4 * i : at + 4 * i + 4] = number.to_bytes(4, "little", signed=True)
        return body

    return change


def entry(**values: Any) -> Any:
    return lambda header, text, body: text["weights"][0].update(values)


def top(**values: Any) -> Any:
    return lambda header, text, body: text.update(values)


SPOILED = {
    "version": (top(version=2), r"version is 2; it must be 1; a newer"),
    "version as truth": (top(version=True), r"version is True"),
    "edge": (top(edge="crop"), r"edge is 'crop'; it must be 'pad'"),
    "block": (top(block="0x2"), r"block \(0, 2\) must have"),
    "block written otherwise": (top(block="2x2"), r"block is '2x2'; it must be '2x2x1x1'"),
    "unknown key": (top(more=1), r"unknown key 'more'"),
    "names": (top(names=["conv.weight"]), r"names is .*every tensor of the file"),
    "names twice": (top(names=["conv.weight", "conv.bias", "conv.bias"]), r"without repetition"),
    "tied to nothing": (top(tied={"conv.x": "conv.y"}, names=["conv.weight", "conv.bias", "conv.x"]), r"names is"),
    "tied in a circle": (top(tied={"a": "b", "b": "a"}), r"tied is"),
    "hash": (top(mask_hash="sha256:" + "0" * 64), r"the hash of the kept blocks is sha256:bb1c"),
    "receipt": (top(receipt={"format": 9}), r"receipt: format is 9"),
    "shape": (entry(shape=[3, 4, 1, 3]), r"kernel is a list of 2; it must be \[1, 3\]"),
    "negative shape": (entry(shape=[3, -4, 1, 2]), r"weights\[0\]: shape is"),
    "overflowing shape": (entry(shape=[2**40, 2**40, 1, 2]), r"weights\[0\]: shape is"),
    "groups": (entry(groups=2), r"cannot be divided into 2 groups"),
    "axes": (entry(transposed=True), r"output_axis is 0; it must be 1"),
    "dtype": (entry(dtype="F128"), r"dtype is 'F128'; it must be one of F64"),
    "other dtype": (entry(dtype="F16"), r"conv\.weight#values is F32 \[3, 1, 1, 2, 2\]; it must be F16"),
    "count": (entry(blocks=2), r"conv\.weight#cols is I32 \[3\]; it must be I32 \[2\]"),
    "too many": (entry(blocks=9), r"blocks is 9; it must be an integer from 0 to 8"),
    "said to be dense": (entry(blocks=None), r"there is no tensor of that name"),
    "name": (entry(name="conv.bias"), r"conv\.bias#rows is missing"),
    "rows fall": (put(24, 0, 4, 3), r"conv\.weight#rows must start at 0, never fall, and end at 3"),
    "rows start": (put(24, 1, 2, 3), r"#rows must start"),
    "rows end": (put(24, 0, 2, 2), r"#rows must start"),
    "rows negative": (put(24, 0, -2, 3), r"#rows must start"),
    "cols out of range": (put(12, 1, 2, 4), r"conv\.weight#cols must increase within each row and stay below 4"),
    "cols negative": (put(12, -1, 2, 3), r"#cols must"),
    "cols fall": (put(12, 2, 1, 3), r"#cols must"),
    "cols twice": (put(12, 1, 1, 3), r"#cols must"),
    "another block": (put(12, 0, 2, 3), r"the hash of the kept blocks is"),
    "rows moved": (put(24, 0, 3, 3), r"the hash of the kept blocks is"),
    "a block of zeros": (put(36 + 16, 0, 0, 0, 0), r"#values holds a block of zeros"),
    "padding": (put(36 + 44, 1), r"#values holds more than zeros beyond the edge"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_every_check_has_its_message(case: str, tmp_path: Path) -> None:
    change, message = SPOILED[case]
    path = spoiled(tmp_path, change)
    for read in (sp.unpack, sp.verify, sp.report):
        with pytest.raises(sp.SmartpruneError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_a_small_file_that_claims_a_terabyte_is_refused(tmp_path: Path) -> None:
    """A terabyte in a kilobyte: refused before anything of that size is made; a limit draws the line elsewhere."""
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
    path.write_bytes(join(header, {**text, "weights": [weight]}, b"\0" * 8))
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
    header, text, body = split(path.read_bytes())
    header.pop("__metadata__")
    for wrong in ("", "{", "[]", "null", "3", '"x"', '{"version": NaN}', "[" * 100_000, '{"version":1,"version":1}', "\x00"):
        path.write_bytes(join(dict(header), wrong, body))
        with pytest.raises(sp.SmartpruneError, match=r"odd: smartprune\.packed"):
            sp.unpack(path)
    header["__metadata__"] = {KEY: json.dumps(text), "another": "tool may add its own"}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    assert sp.unpack(path)["conv.weight"].equal(documented_example()["conv.weight"])
    with pytest.raises(sp.SmartpruneError, match="not a readable safetensors file"):
        sp.unpack(Path(__file__))
