"""Files: written whole or not at all, and read without trust."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from .errors import SmartpruneError


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file that a crash leaves either as it was or complete: a temporary file beside it takes its place."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
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


def read_capped(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a file that has at most ``most`` of them."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise SmartpruneError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > most:
        raise SmartpruneError(f"{path}: larger than {most:,} bytes, which no such file is; check that it is the right one")
    return data


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
