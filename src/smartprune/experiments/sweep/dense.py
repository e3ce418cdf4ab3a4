"""The dense models of a sweep. Each is trained once, in a hidden run folder, and then kept as one file.

For machines that return only small files, the models can also be kept as parts of less than 16 MiB, in half precision. All runs
then start from the rounded weights, so that they are the same on the machine that trained them and on every other.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...errors import SmartpruneError
from ...files import read_limited, write_atomic
from ...run_files import DENSE

PART_BYTES = 15 << 20
MAX_BYTES = 1 << 31
PART = re.compile(r"(?P<name>.+)\.(?P<digest>[0-9a-f]{16})\.(?P<number>\d+)-of-(?P<count>\d+)")


class DenseModels:
    """Dense models by name, in one folder. With ``parts``, every model is also kept in that folder, and put back from there."""

    def __init__(self, folder: Path, parts: Path | None = None) -> None:
        self.folder, self.parts = folder, parts

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def run_folder(self, name: str) -> Path:
        """Where the dense model is trained."""
        return self.folder / f".{name}"

    def collect(self, name: str) -> bool:
        """Copies the dense model out of its run folder as soon as the dense stage has written it. True once it is there."""
        path, trained = self.path(name), self.run_folder(name) / DENSE
        if path.exists():
            return True
        if self.parts is not None and (kept := read_parts(self.parts, name)) is not None:
            write_atomic(path, kept)
        elif trained.exists():
            data = trained.read_bytes()
            if self.parts is not None:
                data = save(_rounded(load(data)))
                write_parts(self.parts, name, data)
            write_atomic(path, data)
        return path.exists()

    def remove_run_folder(self, name: str) -> None:
        shutil.rmtree(self.run_folder(name), ignore_errors=True)


def _rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half precision for matrices and kernels; vectors, such as running variances, and large numbers keep their precision."""
    out = {}
    for name, weight in weights.items():
        half = weight.half() if weight.dtype == torch.float32 and weight.dim() > 1 else weight
        out[name] = half if bool(torch.isfinite(half).all()) else weight
    return out


def write_parts(folder: Path, name: str, data: bytes) -> None:
    """Writes ``NAME.HASH.1-of-2`` and so on. Every name has the hash of the whole."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    digest = hashlib.sha256(data).hexdigest()[:16]
    for number, piece in enumerate(pieces, 1):
        write_atomic(folder / f"{name}.{digest}.{number}-of-{len(pieces)}", piece)


def read_parts(folder: Path, name: str) -> bytes | None:
    """The file whose parts are in the folder; None if it has no part of it. Raises if parts are missing or damaged."""
    paths = {
        path: match for path in sorted(folder.glob("*-of-*")) if (match := PART.fullmatch(path.name)) and match["name"] == name
    }
    if not paths:
        return None
    digests, counts = ({match[key] for match in paths.values()} for key in ("digest", "count"))
    order = sorted(paths, key=lambda path: int(paths[path]["number"]))
    numbers = [int(paths[path]["number"]) for path in order]
    if len(digests) > 1 or len(counts) > 1 or numbers != list(range(1, int(next(iter(counts))) + 1)):
        raise SmartpruneError(
            f"{folder}: the parts of {name} are {', '.join(path.name for path in order)}; give all parts of one model"
        )
    data = b"".join(read_limited(path, PART_BYTES) for path in order)
    if len(data) > MAX_BYTES or hashlib.sha256(data).hexdigest()[:16] != next(iter(digests)):
        raise SmartpruneError(
            f"{folder}: the parts of {name} are damaged; copy them again, or delete them to train the model again"
        )
    try:
        load(data)
    except SafetensorError as error:
        raise SmartpruneError(f"{folder}: the parts of {name} hold no model ({error}); delete them") from None
    return data
