"""Files: written whole or not at all, and read without trust."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from .errors import SmartpruneError

# what is open in this process, by its paths
OPEN_FILES = r"/dev/std(out|err)|/(?:dev|proc/self|proc/thread-self|proc/{})/fd/(\d{{1,9}})"
MOST_LINKS = 40


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises now what :func:`write_atomic` would raise after the work: for a folder, a folder that is not there, a disk."""
    _target(path)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises now what making a folder would raise after the work."""
    place = as_path(path, "folder").absolute()
    check_name(path)
    if os.path.lexists(place) and not place.is_dir():
        raise SmartpruneError(f"{place}: is a file; give a folder")
    while not place.is_dir():
        if os.path.lexists(place):
            raise SmartpruneError(f"{os.fspath(path)}: the folder cannot be made ({place} is a file)")
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise SmartpruneError(f"{os.fspath(path)}: the folder cannot be made ({place} does not allow it)")


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuses a path that is not text: files of it can be made, but others, such as safetensors, cannot open them."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise SmartpruneError(
            f"{os.fspath(path)!r} is not valid UTF-8, so that not every reader could open what is written there; give another path"
        ) from None


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file that a crash leaves either as it was or complete: a temporary file beside it takes its place.

    A link is followed, and what it points to is replaced. A pipe or a device such as ``/dev/null`` is written to, and so is what
    is open already, such as ``/dev/stdout``, wherever that leads.
    """
    target = _target(path)
    try:
        if (handle := _open_file(path)) is not None:
            for printed in (sys.stdout, sys.stderr):  # before what comes now
                if printed is not None:
                    printed.flush()
            with open(handle, "wb", buffering=0, closefd=False) as stream:
                _pour(stream, data)
            return
        if target.exists() and not target.is_file():
            with open(target, "wb", buffering=0) as stream:
                _pour(stream, data)
            return
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:50]}.", suffix=".part", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # mkstemp lets nobody else read
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        if os.name == "posix":
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the new name outlives a power cut only if its folder is written too
            finally:
                os.close(folder)
    except OSError as error:
        raise SmartpruneError(f"{target}: cannot be written ({error.strerror or error})") from error


def _pour(stream: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]


def _target(path: str | os.PathLike[str]) -> Path:
    """Where the bytes go: the path itself, or what a link at that path leads to."""
    shown = _shown(path)
    if shown is None or not os.fspath(path):
        raise SmartpruneError(f"{path!r} is no path of a file to write; give one such as 'model.safetensors'")
    check_name(path)
    if (handle := _open_file(path)) is not None:
        _check_open(handle, shown)
        return Path(path)
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:  # such as links that lead in a circle, or a file where a folder should be
        raise SmartpruneError(f"{shown}: cannot be written ({error.strerror or error})") from error
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        return Path(path)
    if not stat.S_ISREG(kind):
        what = "a folder; add the name of a file" if stat.S_ISDIR(kind) else "a disk or a socket; give the path of a file"
        raise SmartpruneError(f"{shown}: cannot be written (it is {what})")
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if not target.parent.is_dir():
        raise SmartpruneError(f"{shown}: cannot be written (there is no folder {target.parent}); make it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SmartpruneError(f"{shown}: cannot be written (the folder {target.parent} does not allow it)")
    return target


def _open_file(path: str | os.PathLike[str]) -> int | None:
    """The descriptor that a path such as ``/dev/stdout`` stands for; None for any other."""
    place = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        if found := re.fullmatch(OPEN_FILES.format(os.getpid()), place):
            return {"out": 1, "err": 2}[found[1]] if found[1] else int(found[2])
        if not os.path.islink(place):
            break
        place = os.path.abspath(os.path.join(os.path.dirname(place), os.readlink(place)))
    return None


def _check_open(handle: int, shown: str) -> None:
    """Raises unless a descriptor is open for writing."""
    try:
        os.write(handle, b"")
    except OSError as error:
        raise SmartpruneError(f"{shown}: cannot be written ({error.strerror or error})") from error


def _shown(path: object) -> str | None:
    """A path as text; None where it is none."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    return text if isinstance(text, str) and "\0" not in text else None


def as_path(path: object, where: str) -> Path:
    """A path that can be asked for a file."""
    if _shown(path) is None:
        raise SmartpruneError(f"{where}: {path!r} is no path; give that of a file, such as 'model.safetensors'")
    return Path(path)  # type: ignore[arg-type]


def check_no_overwrite(target: str | os.PathLike[str], read: Mapping[str, str | os.PathLike[str] | None], where: str) -> None:
    """Refuses to write over a file that is read, whatever name it goes by. ``read`` has a word for each of them."""
    for what, path in read.items():
        try:
            same = path is not None and os.path.isfile(path) and os.path.samefile(target, path)
        except (OSError, ValueError):  # the target is not there yet
            continue
        if same:
            raise SmartpruneError(f"{where} {os.fspath(target)} is {what} itself; give another path for the file to write")


def read_limited(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file that has at most ``most`` of them."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > most:
        raise SmartpruneError(f"{path}: larger than {most:,} bytes, which no such file is; check that it is the right one")
    return data


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raises what the system says where a file cannot be opened; not every reader passes that on."""
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def parse_json(data: bytes | str, where: str) -> object:
    """Plain data from JSON text; keys that come twice, NaN and infinity are refused."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a key comes twice")
        return out

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(data, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise SmartpruneError(f"{where}: not readable as JSON ({error}); it may be damaged or cut off") from None
