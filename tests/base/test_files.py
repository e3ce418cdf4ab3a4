"""Atomic writes, and the checks before them."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from smartprune.errors import SmartpruneError
from smartprune.files import (
    as_path,
    check_folder,
    check_no_overwrite,
    check_readable,
    check_writable,
    open_regular,
    parse_json,
    read_limited,
    write_atomic,
)


def test_write_replaces_the_target_of_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far" / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(Path("far") / "real")
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    dead = tmp_path / "dead"
    dead.symlink_to(Path("far") / "not yet")
    write_atomic(dead, b"there")
    assert dead.is_symlink()
    assert (tmp_path / "far" / "not yet").read_bytes() == b"there"
    assert sorted(os.listdir(tmp_path / "far")) == ["not yet", "real"]


def test_write_refuses_broken_symlinks(tmp_path: Path) -> None:
    loop, dangling = tmp_path / "loop", tmp_path / "dangling"
    loop.symlink_to("loop")
    dangling.symlink_to(Path("no") / "such")
    for path in (loop, dangling):
        with pytest.raises(SmartpruneError, match="cannot be written"):
            write_atomic(path, b"x")
        assert path.is_symlink()


def test_write_to_a_pipe_keeps_the_pipe(tmp_path: Path) -> None:
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    data = os.urandom(1 << 20)  # more than a pipe holds at once
    write_atomic(pipe, data)
    reader.join()
    assert received == [data]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_write_to_a_device_keeps_the_device(tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    write_atomic("/dev/null", b"x" * 100)
    after = os.stat("/dev/null")
    assert (before.st_ino, before.st_rdev, before.st_mode) == (after.st_ino, after.st_rdev, after.st_mode)
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    write_atomic(link, b"x")
    assert link.is_symlink()
    if os.path.exists("/dev/full"):
        with pytest.raises(SmartpruneError, match=r"/dev/full: cannot be written \(No space left on device\)"):
            write_atomic("/dev/full", b"x")


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="needs descriptors that have paths")
@pytest.mark.parametrize("path", ["/dev/fd/{}", "/proc/self/fd/{}", "/proc/{pid}/fd/{}", "/dev/../dev/fd/{}", "link"])
def test_write_to_a_descriptor_path_keeps_the_open_file(path: str, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_bytes(b"old")
    before = real.stat().st_ino
    with real.open("r+b", buffering=0) as file:
        file.seek(3)
        name = path.format(file.fileno(), pid=os.getpid())
        if path == "link":
            (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
            name = str(tmp_path / "link")
        check_writable(name)
        write_atomic(name, b" new")
        write_atomic(name, b" newer")
    assert real.read_bytes() == b"old new newer"
    assert real.stat().st_ino == before
    with real.open("rb") as file, pytest.raises(SmartpruneError, match="cannot be written"):
        check_writable(f"/dev/fd/{file.fileno()}")


def test_write_to_dev_stdout_keeps_the_order_of_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    print("printed")
    write_atomic("/dev/stdout", b"out\n")
    write_atomic("/dev/stderr", b"err\n")
    print("printed later")
    assert capfd.readouterr() == ("printed\nout\nprinted later\n", "err\n")


def test_paths_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    bad = str(tmp_path / "bad\udcff")
    for check in (check_writable, check_folder, lambda path: write_atomic(path, b"x")):
        with pytest.raises(SmartpruneError, match=r"bad\\udcff' is not valid UTF-8.*give another path"):
            check(bad)
    assert not list(tmp_path.iterdir())


def test_check_readable_gives_the_reason_of_the_system(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(SmartpruneError, match=rf"cannot be read \({message}\)"):
            check_readable(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes that have paths")
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "socket"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    """Reading a pipe waits for a writer, and some devices never end."""
    path = Path("/dev/zero") if kind == "device" else tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    for read in (check_readable, lambda path: read_limited(path, 100)):
        with pytest.raises(SmartpruneError, match=r"(odd|zero): cannot be read \((it is a|No such device)"):
            read(path)
    with pytest.raises(OSError, match=r"it is a|No such device"):
        open_regular(path)


def test_a_file_above_its_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert read_limited(path, 5) == b"12345"
    with pytest.raises(SmartpruneError, match="large: larger than 4 bytes"):
        read_limited(path, 4)
    os.truncate(path, 1 << 40)  # sparse: it takes no space on the disk
    with pytest.raises(SmartpruneError, match="large: larger than"):
        read_limited(path, 1 << 39)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1e400]", "1e400 is not a number that floats can hold"),
        ("[-1E+0400]", "-1E.0400 is not a number"),
        ("[1" + "0" * 309 + ".0]", "10000000000000000000 is not a number"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "Infinity is not a JSON number"),
        ("[" * 100_000, "recursion"),
        ('{"a": 1, "a": 2}', "duplicate key"),
        (r'["\ud83d"]', "surrogates not allowed"),
        (r'{"\uDC00": 1}', "surrogates not allowed"),
        ("[" + "1" * 5000 + "]", "limit"),
        (b"\xff", "codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_json_that_is_not_plain_data_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(SmartpruneError, match=rf"file: not readable as JSON \(.*{problem}.*\); it may be damaged"):
        parse_json(text, "file")


def test_json_numbers_and_texts_are_read_exactly() -> None:
    text = r'[1e308, -1e-400, 12345678901234567890, 0.1, "\ud83d\ude00 \\ud83d", true, null, {"é": []}]'
    value = [1e308, -0.0, 12345678901234567890, 0.1, "\U0001f600 \\ud83d", True, None, {"é": []}]
    assert parse_json(text, "file") == parse_json(text.encode("utf-16"), "file") == value


def test_check_writable_raises_what_write_atomic_raises(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "it is a folder; add the name of a file"),
        (tmp_path / "no" / "such", "the folder .*no does not exist"),
        ("", "is not the path of a file to write"),
        ("a\0b", "is not the path of a file to write"),
    ):
        with pytest.raises(SmartpruneError, match=message):
            check_writable(path)
        with pytest.raises(SmartpruneError, match=message):
            write_atomic(path, b"")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SmartpruneError, match=r"cannot be written \(Not a directory\)"):
        check_writable(tmp_path / "file" / "inner")
    check_writable(tmp_path / "new")
    write_atomic(tmp_path / ("n" * 250), b"long")  # close to the longest name that a file may have
    assert sorted(map(len, os.listdir(tmp_path))) == [4, 250]


def test_check_folder_refuses_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    check_folder(tmp_path)
    check_folder(tmp_path / "a" / "b")
    for path in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(SmartpruneError, match="is a file"):
            check_folder(path)


def test_check_no_overwrite_finds_inputs_under_other_names(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.write_bytes(b"weights")
    (tmp_path / "link").symlink_to("model")
    os.link(model, tmp_path / "hard")
    for path in (model, tmp_path / "link", tmp_path / "hard", tmp_path / "." / "model"):
        with pytest.raises(SmartpruneError, match=r"--out .* is the model itself"):
            check_no_overwrite(path, {"the receipt": None, "the model": model}, "--out")
    check_no_overwrite(tmp_path / "other", {"the model": model}, "--out")
    check_no_overwrite("/dev/null", {"the model": "/dev/null"}, "--out")  # writing there loses nothing


@pytest.mark.parametrize("path", [None, 3, b"bytes", "a\0b"])
def test_as_path_refuses_other_values(path: object) -> None:
    with pytest.raises(SmartpruneError, match=r"pack: path: .* is not a path; give the path of a file"):
        as_path(path, "pack: path")
