"""Reads CIFAR-10 from disk, in any of three forms: the official Python and binary batches, and mosaics of pictures.

Files are not trusted: of a Python batch only the bytes are taken, and nothing in it is ever called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SmartpruneError

Bytes = NDArray[np.uint8]
Part = tuple[Bytes, Bytes]  # pictures [n, 32, 32, 3], labels [n]

SIDE, COLOURS, CLASSES = 32, 3, 10
PICTURE = COLOURS * SIDE * SIDE
BATCHES = 5  # files of the official training set
SUBFOLDERS = ("", "cifar10", "cifar-10-batches-py", "cifar-10-batches-bin")
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
ANEW = "fetch it again"


@lru_cache(maxsize=4)
def read(folder: Path, part: str) -> Part:
    """All pictures and labels of ``"train"`` or ``"test"``, in the official order."""
    place, form = find(folder)
    pictures, labels = READERS[form](place, part)
    if len(labels) == 0:
        raise SmartpruneError(f"{place}: the {part} part of CIFAR-10 is empty; {ANEW}")
    return pictures, labels


def find(folder: Path) -> tuple[Path, str]:
    """The folder that holds the files, which may be one below, and their form."""
    wanted = {"python": "data_batch_1", "binary": "data_batch_1.bin", "mosaic": "train_labels.npy"}
    for place in (folder / name for name in SUBFOLDERS):
        for form, name in wanted.items():
            if (place / name).is_file():
                return place, form
    what = "holds no CIFAR-10" if folder.is_dir() else "is not a folder"
    raise SmartpruneError(
        f"{folder} {what}: none of {', '.join(wanted.values())} is there or in {', '.join(SUBFOLDERS[1:])} below it; "
        f"unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz from {HOME} and give its folder"
    )


def read_python(place: Path, part: str) -> Part:
    names = ["test_batch"] if part == "test" else [f"data_batch_{i + 1}" for i in range(BATCHES)]
    return _joined([_python_batch(place / name) for name in names])


def read_binary(place: Path, part: str) -> Part:
    names = ["test_batch.bin"] if part == "test" else [f"data_batch_{i + 1}.bin" for i in range(BATCHES)]
    out = []
    for path in (place / name for name in names):
        content = _content(path)
        if len(content) % (PICTURE + 1):
            raise SmartpruneError(f"{path} has {len(content)} bytes, no multiple of {PICTURE + 1} (a label and a picture); {ANEW}")
        records = np.frombuffer(content, np.uint8).reshape(-1, PICTURE + 1)
        out.append((_pictures(records[:, 1:]), _labels(records[:, 0], path)))
    return _joined(out)


def read_mosaic(place: Path, part: str) -> Part:
    """Pictures of many tiles of 32x32, row by row, and one ``.npy`` file of labels."""
    path = place / f"{part}_labels.npy"
    try:
        values = np.load(io.BytesIO(_content(path)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise SmartpruneError(f"{path} cannot be read as an array ({error}); {ANEW}") from None
    labels = _labels(values, path)
    tiles: list[Bytes] = []
    while sum(map(len, tiles)) < len(labels):
        tiles.append(_tiles(place / ("test.webp" if part == "test" else f"train_{len(tiles)}.jpg")))
        if part == "test":
            break
    pictures = np.concatenate(tiles) if tiles else np.zeros((0, SIDE, SIDE, COLOURS), np.uint8)
    if len(pictures) != len(labels):
        raise SmartpruneError(f"{path} has {len(labels)} labels for {len(pictures)} pictures; {ANEW}, and its pictures")
    return pictures, labels


READERS: dict[str, Callable[[Path, str], Part]] = {
    "python": read_python,
    "binary": read_binary,
    "mosaic": read_mosaic,
}


class _Inert:
    """Stands for a numpy array, or its type, in a pickled file: keeps what was stored and does nothing with it."""

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Knows the few names that a pickled numpy array refers to, all of them inert."""

    names: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Inert,
        ("numpy._core.multiarray", "_reconstruct"): _Inert,
        ("numpy", "ndarray"): _Inert,
        ("numpy", "dtype"): _Inert,
        ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which an array of bytes does not need")
        return self.names[module, name]


def _python_batch(path: Path) -> Part:
    content = _content(path)
    try:
        batch = _Reader(io.BytesIO(content), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        _, shape, _, fortran, stored = batch["data"].state
        labels = np.array(batch["labels"], np.int64)
    except Exception as error:  # a damaged file may raise anything
        raise SmartpruneError(f"{path} cannot be read as a batch of CIFAR-10 ({error!r:.200}); {ANEW}") from None
    whole = isinstance(stored, bytes) and not fortran and len(stored) == len(labels) * PICTURE
    if not whole or tuple(shape) != (len(labels), PICTURE):
        raise SmartpruneError(f"{path} holds {shape} values for {len(labels)} labels; {ANEW}")
    return _pictures(np.frombuffer(stored, np.uint8).reshape(shape)), _labels(labels, path)


def _tiles(path: Path) -> Bytes:
    content = _content(path)
    try:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise SmartpruneError(f"{path} is read with Pillow, which is not installed; run: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "WEBP", "PNG")) as image:
            mosaic = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SmartpruneError(f"{path} cannot be read as a picture ({error}); {ANEW}") from None
    height, width, _ = mosaic.shape
    if height % SIDE or width % SIDE:
        raise SmartpruneError(f"{path} has {width}x{height} pixels, which is no mosaic of {SIDE}x{SIDE}; {ANEW}")
    split = mosaic.reshape(height // SIDE, SIDE, width // SIDE, SIDE, COLOURS).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(split.reshape(-1, SIDE, SIDE, COLOURS))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SmartpruneError(f"{path} cannot be read ({error.strerror or error}); {ANEW}") from None


def _pictures(planes: Bytes) -> Bytes:
    """From one plane per colour to one pixel after the other."""
    return np.ascontiguousarray(planes.reshape(-1, COLOURS, SIDE, SIDE).transpose(0, 2, 3, 1))


def _labels(values: NDArray[Any], path: Path) -> Bytes:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise SmartpruneError(f"{path} holds {values.ndim} axes of {values.dtype}; labels are one of integers; {ANEW}")
    wrong = (values < 0) | (values >= CLASSES)
    if wrong.any():
        raise SmartpruneError(f"{path}: label {values[wrong][0]} is not 0 to {CLASSES - 1}; {ANEW}")
    return values.astype(np.uint8)


def _joined(parts: list[Part]) -> Part:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
