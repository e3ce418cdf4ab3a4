"""The cache of compiled kernels: files that contain the hash of their content in their names.

The files are executed, and a damaged one can end the process when it is loaded. So nothing is used before its owner, its
permissions and its hash are checked. New files are written to the disk before they get their names.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

DIGITS = 32  # of the hash in a name
MOST_BYTES = 1 << 26  # larger files are not ours
ABANDONED = 86_400.0  # seconds after which the folder of an unfinished build is removed
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# What Windows lacks is 0 or None. A pipe must not block.
OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
DIRECTORY = getattr(os, "O_DIRECTORY", None)


def shared_folder() -> Path | None:
    """The folder that processes share, $SMARTPRUNE_CACHE or ~/.cache/smartprune. None if other users could write to it."""
    setting = os.environ.get("SMARTPRUNE_CACHE")
    try:
        folder = Path(setting) if setting else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smartprune"
        with suppress(OSError):  # it may exist on a read-only disk
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    return folder if stat.S_ISDIR(status.st_mode) and _is_trusted(status) else None


@cache
def private_folder() -> Path:
    """A temporary folder of this process, which is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="smartprune-cache-"))
    # Only processes forked from this one use the folder, and this process waits for them before finalizers run. atexit does
    # not run in processes that multiprocessing started.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)
    return folder


@cache
def cache_folder() -> Path:
    """The folder for new files: the shared one, or the private one if that is not writable."""
    folder = shared_folder()
    is_writable = folder is not None and _is_ours(os.stat(folder)) and os.access(folder, os.W_OK | os.X_OK)
    return folder if folder is not None and is_writable else private_folder()


def readable_folders() -> list[Path]:
    """The folders to look for files in."""
    shared = shared_folder()
    return list(dict.fromkeys([*([shared] if shared else []), cache_folder()]))


def find(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The intact files with this stem, the newest first. ``stem`` may contain wildcards. Damaged files are removed."""
    out: list[tuple[int, Path]] = []
    for path in folder.glob(f"{stem}-{'[0-9a-f]' * DIGITS}{suffix}"):
        try:
            status, content = _read(path)
        except OSError:
            continue
        if status is None:  # not a file, or one that other users can write to
            continue
        if path.name.endswith(f"-{_digest(content)}{suffix}"):
            out.append((status.st_mtime_ns, path))
        else:
            with suppress(OSError):
                path.unlink()
    return [path for _, path in sorted(out, reverse=True)]


def keep(part: Path, folder: Path, stem: str, suffix: str) -> Path:
    """Moves a finished file into the folder. It is on the disk before it has its name."""
    with part.open("rb+") as file:  # Windows writes only files to the disk that are open for writing
        content = file.read()
        if hasattr(os, "fchmod"):
            os.fchmod(file.fileno(), 0o644)  # whatever the umask is
        os.fsync(file.fileno())
    path = folder / f"{stem}-{_digest(content)}{suffix}"
    with suppress(OSError):
        path.rmdir()  # a folder of that name would be in the way for ever
    os.replace(part, path)
    if DIRECTORY is not None:
        handle = os.open(folder, os.O_RDONLY | DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return path


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A new folder below for unfinished files. It is removed at the end, as are those of processes that were killed."""
    for old in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > ABANDONED:
                shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read(path: Path) -> tuple[os.stat_result | None, bytes]:
    """The status and the content of a file that only this user or root can write, else (None, empty)."""
    handle = os.open(path, OPEN_FLAGS)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(status) or status.st_size > MOST_BYTES:
            return None, b""
        return status, file.read(MOST_BYTES + 1)


def _is_trusted(status: os.stat_result) -> bool:
    """Whether only this user and root can write to a file or a folder. Windows has no such bits: there, the folder of the user is
    protected by its access control list."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid in (0, os.getuid()) and not status.st_mode & OTHERS_WRITE


def _is_ours(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
