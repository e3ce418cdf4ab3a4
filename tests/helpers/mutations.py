"""Random damage to files: to their bytes, and to the values of JSON, of headers of safetensors files and of checkpoints."""

from __future__ import annotations

import io
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    127,
    128,
    255,
    256,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    1 << 40,
    (1 << 62) + 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
DIGITS = (b"0", b"-1", b"1e400", b"NaN", b"9" * 30, b"9" * 5000, b"1e-400", b"007", b"0.5", b"2147483648", b"9223372036854775808")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1 << 20, 1 << 31, 1 << 53, 1 << 63, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-300, 1e300),
    *(
        "",
        "x",
        "x" * 5000,
        "\ud800",
        "\x1b[2J\u202e",
        "=1+1",
        "../../x",
        "/dev/zero",
        "a\0b",
        "1e400",
        "sha256:" + "0" * 64,
        "1x1",
        "*",
    ),
    *([], {}, [None], [[]], {"": 0}, [0] * 3000, {"a": {"a": {"a": 1}}}),
)


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    """Damaged data. ``kind`` is ``bytes``, ``json``, ``safetensors`` or ``torch``; half of the damage keeps the format intact."""
    if kind in STRUCTURED and rng.random() < 0.5:
        return STRUCTURED[kind](data, rng)
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        rng.choice(DAMAGE)(out, rng)
    return bytes(out)


# ---- bytes


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_early(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(min(len(data), 512))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 2, 4, 8, 64, 512))]


def _insert(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.choice((b"\0", b"\xff", b"[" * 2000, b"{" * 50, b"\xff" * 1000, b'"', rng.randbytes(16)))


def _splice(data: bytearray, rng: random.Random) -> None:
    start, to = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    part = data[start : start + rng.choice((4, 16, 64, 1024))]
    data[to : to + len(part) * rng.randrange(2)] = part


def _edit_length(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((1, 2, 4, 8))
    if len(data) >= size:
        start = rng.randrange(len(data) - size + 1)
        data[start : start + size] = (rng.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, rng.choice(("little", "big")))


def _edit_digits(data: bytearray, rng: random.Random) -> None:
    runs = list(re.finditer(rb"\d+", bytes(data[: 1 << 16])))
    if runs:
        run = rng.choice(runs)
        data[run.start() : run.end()] = rng.choice(DIGITS)


DAMAGE: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(_flip, _flip_early, _cut, _remove, _insert, _splice, _edit_length, _edit_length, _edit_digits),
)


# ---- values


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with one to three of its parts replaced, removed, renamed or repeated. A text that holds JSON is a part, too."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _mutate_once(value, rng)
    return value


def _mutate_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str) and value.startswith("{") and rng.random() < 0.9:
        return json.dumps(_mutate_once(json.loads(value), rng))
    if not isinstance(value, (dict, list, tuple)) or not value or rng.random() < 0.15:
        return rng.choice(VALUES)
    if isinstance(value, (list, tuple)):
        items = list(value)
        at = rng.randrange(len(items))
        action = rng.random()
        if action < 0.1:
            del items[at]
        elif action < 0.2:
            items.insert(at, items[rng.randrange(len(items))])
        else:
            items[at] = _mutate_once(items[at], rng)
        return type(value)(items)
    key, action = rng.choice(list(value)), rng.random()
    if action < 0.1:
        return {name: item for name, item in value.items() if name != key}
    if action < 0.15:
        return {**value, rng.choice(("", "x", "\ud800", "a" * 2000, "\x1b[2J")): value[key]}
    if action < 0.2:
        return {**value, key: value[rng.choice(list(value))]}
    return {**value, key: _mutate_once(value[key], rng)}


def _json(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n") if data.count(b"\n{") else [data]  # one value, or one per line
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(mutate_value(json.loads(lines[at] or b"{}"), rng)).encode()
    return b"\n".join(lines)


def _safetensors(data: bytes, rng: random.Random) -> bytes:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(mutate_value(json.loads(data[8:start]), rng)).encode()
    return struct.pack("<Q", len(header)) + header + data[start:]


def _torch(data: bytes, rng: random.Random) -> bytes:
    out = io.BytesIO()
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(mutate_value(torch.load(io.BytesIO(data), weights_only=True), rng), out)
    except UnicodeEncodeError:  # half characters, which pickles cannot hold
        return data[: rng.randrange(len(data))]
    finally:
        torch.serialization.set_crc32_options(checksums)
    return out.getvalue()


STRUCTURED: dict[str, Callable[[bytes, random.Random], bytes]] = {"json": _json, "safetensors": _safetensors, "torch": _torch}
