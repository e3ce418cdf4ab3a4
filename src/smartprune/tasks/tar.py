"""Lists the members of uncompressed tar files. They are not trusted: every number is checked before it is used.

The module tarfile of older Python versions loops forever on members of negative size, and takes hours for some headers of 1 MB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Literal

from ..files import file_size

BLOCK = 512  # bytes; headers and data start at multiples of it
MAX_EXTENSION = 1 << 20  # bytes of a long name or of a list of extended attributes
Kind = Literal["file", "folder", "hard link", "symbolic link", "other"]
KINDS: Mapping[bytes, Kind] = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    b"1": "hard link",
    b"2": "symbolic link",
    b"5": "folder",
}
LONG_NAMES = {b"L": "path", b"K": "linkpath"}  # of GNU tar: which attribute they set
WITHOUT_DATA = ("hard link", "symbolic link", "folder")
DEVICES = (b"3", b"4", b"6")


@dataclass(frozen=True)
class Member:
    """A member of a tar file, and where its data lies. ``link`` is the target of a link."""

    kind: Kind
    start: int
    size: int
    link: str


class TarError(ValueError):
    """The file is not a plain tar file, or is damaged."""


def tar_members(file: BinaryIO) -> dict[str, Member]:
    """The members by name. The last of several with the same name counts, as when the file is unpacked."""
    size, at = file_size(file), 0
    members: dict[str, Member] = {}
    common: dict[str, str] = {}  # attributes of all members
    own: dict[str, str] = {}  # attributes of the next member
    while at < size:
        file.seek(at)
        header = file.read(BLOCK)
        if len(header) < BLOCK:
            raise TarError("it was cut off" if members else "it is too short")
        if not any(header):
            break
        _check_sum(header)
        code, length = header[156:157], _number(header[124:136])
        at += BLOCK
        if code in LONG_NAMES or code in (b"x", b"g"):
            if length > min(MAX_EXTENSION, size - at):
                raise TarError("it has a name or an attribute that is too long, or was cut off")
            data = file.read(length)
            if code in LONG_NAMES:
                own[LONG_NAMES[code]] = _text(data)
            else:
                (common if code == b"g" else own).update(_attributes(data))
            at += -(-length // BLOCK) * BLOCK
            continue
        name, member = _member(header, code, length, at, {**common, **own})
        if member.size > size - at:
            raise TarError(f"{name[:80]!r} was cut off")
        members[name] = member
        at += -(-member.size // BLOCK) * BLOCK
        own = {}
    if size == 0 or (at >= size and own):
        raise TarError("it is empty, or was cut off")
    return members


def _member(header: bytes, code: bytes, length: int, start: int, attributes: Mapping[str, str]) -> tuple[str, Member]:
    if code == b"S" or any(key.startswith("GNU.sparse.") for key in attributes):
        raise TarError("it has sparse members; create it without --sparse")
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    name = attributes.get("path", f"{prefix}/{_text(header[:100])}" if prefix else _text(header[:100]))
    kind = KINDS.get(code, "other")
    if kind == "file" and name.endswith("/"):  # folders of old tar programs
        kind = "folder"
    if kind == "file" and "size" in attributes:
        text = attributes["size"]
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise TarError(f"{name[:80]!r} has a size that is not a number")
        length = int(text)
    size = 0 if kind in WITHOUT_DATA or code in DEVICES else length
    return name, Member(kind, start, size, attributes.get("linkpath", _text(header[157:257])))


def _attributes(data: bytes) -> dict[str, str]:
    """Extended attributes: lines such as ``19 path=long/name``, which start with their own length."""
    out: dict[str, str] = {}
    while data and data[0]:
        digits = data[:8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        line, data = data[:length], data[length:]
        key, equals, value = line[len(digits) + 1 :].partition(b"=")
        if not line.endswith(b"\n") or len(line) != length or not equals:
            raise TarError("it has damaged attributes")
        out[key.decode(errors="surrogateescape")] = value[:-1].decode(errors="surrogateescape")
    return out


def _number(field: bytes) -> int:
    """A number in octal digits, or in binary if it is large."""
    if field[0] & 0x80:
        number = int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
    else:
        digits = field.split(b"\0")[0].strip()
        number = int(digits or b"0", 8) if set(digits) <= set(b"01234567") else -1
    if number < 0:
        raise TarError("it has a member with a negative size or a damaged header")
    return number


def _check_sum(header: bytes) -> None:
    """Raises unless the sum of the bytes of a header is stored in it. Some programs sum signed bytes."""
    total = 256 + sum(header[:148]) + sum(header[156:])
    signed = total - 256 * sum(byte > 127 for byte in (*header[:148], *header[156:]))
    if _number(header[148:156]) not in (total, signed):
        raise TarError("it has a damaged header, or is compressed")


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode(errors="surrogateescape")
