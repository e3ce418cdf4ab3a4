"""Tar files are listed like tarfile lists them, and hostile ones are refused."""

from __future__ import annotations

import io
import tarfile

import pytest

from smartprune.tasks.tar import TarError, tar_members

LONG = "folder/" * 40 + "é.png"


def make(form: int, **changes: object) -> bytes:
    """A tar file with a member of every kind that data sets have. ``changes`` are attributes of a last member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as file:
        for name, kind, link, size in (
            *(("a", tarfile.DIRTYPE, "", 0), ("a/1.png", tarfile.REGTYPE, "", 700), ("a/2.png", tarfile.LNKTYPE, "a/1.png", 0)),
            *(("a/3.png", tarfile.SYMTYPE, "1.png", 0), ("a/4", tarfile.FIFOTYPE, "", 0), ("a/1.png", tarfile.REGTYPE, "", 3)),
            *(((LONG, tarfile.REGTYPE, "", 5), ("l", tarfile.SYMTYPE, LONG, 0)) if form != tarfile.USTAR_FORMAT else ()),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, size
            file.addfile(member, io.BytesIO(bytes(size)))
        if changes:
            member = tarfile.TarInfo("last.png")
            for name, value in changes.items():
                setattr(member, name, value)
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return out.getvalue()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(form: int) -> None:
    data = make(form)
    kinds = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "folder", tarfile.LNKTYPE: "hard link", tarfile.SYMTYPE: "symbolic link"}
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        expected = {m.name: (kinds.get(m.type, "other"), m.offset_data, m.size, m.linkname) for m in file}
    members = tar_members(io.BytesIO(data))
    assert {name.rstrip("/"): (m.kind, m.start, m.size, m.link) for name, m in members.items()} == expected
    assert len(expected) == (5 if form == tarfile.USTAR_FORMAT else 7)


def set_size(data: bytes, field: bytes) -> bytes:
    """The file with another size in the header of its last member."""
    out = bytearray(data)
    start = data.rindex(b"last.png")
    out[start + 124 : start + 136] = field
    out[start + 148 : start + 156] = b" " * 8
    out[start + 148 : start + 156] = b"%06o\0 " % sum(out[start : start + 512])
    return bytes(out)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (b"\xff" * 10 + b"\xfc\x00", "negative size"),
        (b"\x80" + b"\0" * 3 + b"\x7f" * 8, "was cut off"),
        (b"00000000008\0", "damaged header"),
        (b"00000077777\0", "was cut off"),
    ],
)
def test_sizes_that_lie_are_refused(field: bytes, message: str) -> None:
    with pytest.raises(TarError, match=message):
        tar_members(io.BytesIO(set_size(make(tarfile.USTAR_FORMAT, size=10), field)))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"size": "-512"}, "has a size that is not a number"),
        ({"size": "9" * 30}, "has a size that is not a number"),
        ({"GNU.sparse.major": "1"}, "sparse members"),
        ({"comment": "1" * (2 << 20)}, "too long"),
    ],
)
def test_attributes_that_lie_are_refused(attributes: dict[str, str], message: str) -> None:
    with pytest.raises(TarError, match=message):
        tar_members(io.BytesIO(make(tarfile.PAX_FORMAT, pax_headers=attributes)))


def test_damaged_attributes_are_refused_at_once() -> None:
    """A megabyte of digits takes tarfile hours in some versions of Python."""
    for attributes in (b"1" * (1 << 20), b"9999 path=x\n", b"x path=y\n", b"8 path=x"):
        header = bytearray(make(tarfile.USTAR_FORMAT, name="last.png", type=b"x", size=len(attributes)))
        start = header.rindex(b"last.png") + 512
        header[start : start + len(attributes)] = attributes
        with pytest.raises(TarError, match="damaged attributes"):
            tar_members(io.BytesIO(header))


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"x" * 5000, b"\x1f\x8b" + bytes(600)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(TarError):
        tar_members(io.BytesIO(data))
