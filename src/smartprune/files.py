"""Files: atomic writes, and reads that do not trust what they read."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from . import text
from .errors import SmartpruneError

# paths of open file descriptors of this process
DESCRIPTOR_PATHS = r"/dev/std(out|err)|/(?:dev|proc/self|proc/thread-self|proc/{})/fd/(\d{{1,9}})"
MAX_LINKS = 40
FREE_BYTES = 1 << 26  # that the content of any file may take
MAX_GROWTH = 256  # the content of larger files may take this many times their size
HUGE_NUMBER = re.compile(r"[eE]\+?\d{3}|\d{309}")  # in JSON text
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises the errors that :func:`write_atomic` would raise for this path, before any work is done."""
    _target(path)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises if a folder does not exist at this path and cannot be created."""
    parent = as_path(path, "folder").absolute()
    check_name(path)
    if os.path.lexists(parent) and not parent.is_dir():
        raise SmartpruneError(f"{parent}: is a file; give a folder")
    while not parent.is_dir():
        if os.path.lexists(parent):
            raise SmartpruneError(f"{os.fspath(path)}: the folder cannot be created ({parent} is a file)")
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SmartpruneError(f"{os.fspath(path)}: the folder cannot be created ({parent} is not writable)")


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises for a path that is not valid UTF-8. Python can create such files, but safetensors, for one, cannot open them."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SmartpruneError(
            f"{os.fspath(path)!r} is not valid UTF-8, so other programs may not be able to open the file; give another path"
        ) from None


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file so that a crash leaves either the old or the new content, by renaming a temporary file beside it.

    Symbolic links are followed, and their target is replaced. Pipes, devices such as ``/dev/null``, and open files such as
    ``/dev/stdout`` are written to directly.
    """
    target = _target(path)
    try:
        if (descriptor := _descriptor(path)) is not None:
            for printed in (sys.stdout, sys.stderr):  # printed before, so written before
                if printed is not None:
                    printed.flush()
            with open(descriptor, "wb", buffering=0, closefd=False) as stream:
                _write_all(stream, data)
            return
        if target.exists() and not target.is_file():
            with open(target, "wb", buffering=0) as stream:
                _write_all(stream, data)
            return
        _replace(target, data)
    except OSError as error:
        raise SmartpruneError(f"{target}: cannot be written ({error.strerror or error})") from error


def _replace(target: Path, data: bytes) -> None:
    """Replaces a file by renaming a complete temporary file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name[:50]}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # mkstemp creates files that only their owner can read
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename survives a power cut only if the folder is synced too
        finally:
            os.close(folder)


def _write_all(stream: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]


def _target(path: str | os.PathLike[str]) -> Path:
    """The file to write: the path itself, or the end of a symbolic link. Raises if it cannot be written."""
    shown = _path_text(path)
    if shown is None or not os.fspath(path):
        raise SmartpruneError(f"{path!r} is not the path of a file to write; give one such as 'model.safetensors'")
    check_name(path)
    if (descriptor := _descriptor(path)) is not None:
        _check_descriptor(descriptor, shown)
        return Path(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:  # such as a circle of links, or a file in place of a folder
        raise SmartpruneError(f"{shown}: cannot be written ({error.strerror or error})") from error
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        return Path(path)
    if not stat.S_ISREG(mode):
        kind = "a folder; add the name of a file" if stat.S_ISDIR(mode) else "a disk or a socket; give the path of a file"
        raise SmartpruneError(f"{shown}: cannot be written (it is {kind})")
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if not target.parent.is_dir():
        raise SmartpruneError(f"{shown}: cannot be written (the folder {target.parent} does not exist); create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SmartpruneError(f"{shown}: cannot be written (the folder {target.parent} is not writable)")
    return target


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The file descriptor that a path such as ``/dev/stdout`` stands for, or None for other paths."""
    location = os.path.abspath(path)
    for _ in range(MAX_LINKS):
        if match := re.fullmatch(DESCRIPTOR_PATHS.format(os.getpid()), location):
            return {"out": 1, "err": 2}[match[1]] if match[1] else int(match[2])
        if not os.path.islink(location):
            break
        location = os.path.abspath(os.path.join(os.path.dirname(location), os.readlink(location)))
    return None


def _check_descriptor(descriptor: int, shown: str) -> None:
    """Raises unless a file descriptor is open for writing."""
    try:
        os.write(descriptor, b"")
    except OSError as error:
        raise SmartpruneError(f"{shown}: cannot be written ({error.strerror or error})") from error


def _path_text(path: object) -> str | None:
    """A path as text, or None if the value is not a path."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return text if isinstance(text, str) and "\0" not in text else None


def as_path(path: object, where: str) -> Path:
    """The value as a ``Path``. Raises for values that cannot be the path of a file."""
    if _path_text(path) is None:
        raise SmartpruneError(f"{where}: {text.show(path)} is not a path; give the path of a file, such as 'model.safetensors'")
    return Path(path)  # type: ignore[arg-type]


def check_no_overwrite(target: str | os.PathLike[str], inputs: Mapping[str, str | os.PathLike[str] | None], where: str) -> None:
    """Raises if ``target`` is one of the ``inputs``, also under another name. The keys of ``inputs`` describe them."""
    for what, path in inputs.items():
        try:
            same = path is not None and os.path.isfile(path) and os.path.samefile(target, path)
        except (OSError, ValueError):  # the target does not exist yet
            continue
        if same:
            raise SmartpruneError(f"{where} {os.fspath(target)} is {what} itself; give another path for the output")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to read. Raises OSError, also for pipes, devices and sockets: they may block, or never end."""
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 (the caller closes it)
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode):
        return file
    file.close()
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a device" if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else "not a file"
    raise OSError(errno.EINVAL, f"it is {kind}; copy its content to a file", os.fspath(path))


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def file_size(file: BinaryIO) -> int:
    """The size of an open file. Its position does not change."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size


def growth_limit(size: int) -> int:
    """How many bytes the content of a file of ``size`` bytes may take in memory, where the format lets it claim any number."""
    return max(FREE_BYTES, MAX_GROWTH * size)


def read_limited(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a file. Raises if it has more than ``max_bytes``, or is not a regular file."""
    try:
        with open_regular(path) as file:
            size = file_size(file)
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if max(size, len(data)) > max_bytes:
        raise SmartpruneError(f"{path}: larger than {max_bytes:,} bytes, the limit for such a file; check that it is the right one")
    return data


def read_start(path: str | os.PathLike[str], count: int) -> bytes:
    """The first bytes of a file of any size."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raises with the reason of the operating system if a file cannot be opened, or is not a regular file. Some readers hide that
    reason, or wait forever."""
    try:
        open_regular(path).close()
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def parse_json(data: bytes | str, where: str) -> object:
    """Plain data from JSON text. Raises for duplicate keys, for NaN, infinity and larger numbers, and for half characters."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("duplicate key")
        return out

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not a JSON number")

    def finite(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"{digits[:20]} is not a number that floats can hold")
        return value

    try:
        text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
        check = finite if HUGE_NUMBER.search(text) else None  # a check of every number takes time
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=check)
        if HALF_CHARACTER.search(text):  # of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SmartpruneError(f"{where}: not readable as JSON ({error}); it may be damaged or truncated") from None
    return value
