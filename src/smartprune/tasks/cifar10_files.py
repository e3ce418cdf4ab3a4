"""Reads CIFAR-10 from disk in three formats: the official Python and binary batches, and mosaics of images.

The files are not trusted. Only the bytes of a Python batch are used, and nothing in it is called.
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

from ..arrays import read_array
from ..errors import SmartpruneError
from ..files import read_limited
from ..pickles import check_operations, value_limit
from .images import check_pixels

ByteArray = NDArray[np.uint8]
Images = tuple[ByteArray, ByteArray]  # images [n, 32, 32, 3], labels [n]

SIDE, CHANNELS, CLASSES = 32, 3, 10
IMAGE_BYTES = CHANNELS * SIDE * SIDE
BATCHES = 5  # files of the training set
MAX_BYTES = 1 << 28  # of a file
SUBFOLDERS = ("", "cifar10", "cifar-10-batches-py", "cifar-10-batches-bin")
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
REPAIR = "download it again"


@lru_cache(maxsize=4)
def read(folder: Path, split: str) -> Images:
    """All images and labels of ``"train"`` or ``"test"``, in the official order."""
    folder, layout = find(folder)
    images, labels = READERS[layout](folder, split)
    if len(labels) == 0:
        raise SmartpruneError(f"{folder}: the {split} set of CIFAR-10 is empty; {REPAIR}")
    return images, labels


def find(folder: Path) -> tuple[Path, str]:
    """The folder that holds the files, which may be a known subfolder, and their format."""
    markers = {"python": "data_batch_1", "binary": "data_batch_1.bin", "mosaic": "train_labels.npy"}
    for path in (folder / name for name in SUBFOLDERS):
        for layout, name in markers.items():
            if (path / name).is_file():
                return path, layout
    problem = "holds no CIFAR-10" if folder.is_dir() else "is not a folder"
    raise SmartpruneError(
        f"{folder} {problem}; it or its subfolder {', '.join(SUBFOLDERS[1:])} should hold one of {', '.join(markers.values())}; "
        f"unpack cifar-10-python.tar.gz or cifar-10-binary.tar.gz from {HOMEPAGE} and pass its folder"
    )


def read_python(folder: Path, split: str) -> Images:
    names = ["test_batch"] if split == "test" else [f"data_batch_{i + 1}" for i in range(BATCHES)]
    return _concatenate([_python_batch(folder / name) for name in names])


def read_binary(folder: Path, split: str) -> Images:
    names = ["test_batch.bin"] if split == "test" else [f"data_batch_{i + 1}.bin" for i in range(BATCHES)]
    out = []
    for path in (folder / name for name in names):
        content = _read_bytes(path)
        if len(content) % (IMAGE_BYTES + 1):
            raise SmartpruneError(
                f"{path} has {len(content)} bytes; expected a multiple of {IMAGE_BYTES + 1} (a label and an image); {REPAIR}"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, IMAGE_BYTES + 1)
        out.append((_channels_last(records[:, 1:]), _labels(records[:, 0], path)))
    return _concatenate(out)


def read_mosaic(folder: Path, split: str) -> Images:
    """Images that hold many tiles of 32x32, row by row, and one ``.npy`` file of labels."""
    path = folder / f"{split}_labels.npy"
    labels = _labels(read_array(path, REPAIR), path)
    tiles: list[ByteArray] = []
    while sum(map(len, tiles)) < len(labels):
        tiles.append(_tiles(folder / ("test.webp" if split == "test" else f"train_{len(tiles)}.jpg")))
        if split == "test":
            break
    images = np.concatenate(tiles) if tiles else np.zeros((0, SIDE, SIDE, CHANNELS), np.uint8)
    if len(images) != len(labels):
        raise SmartpruneError(f"{path} has {len(labels)} labels for {len(images)} images; download the labels and the images again")
    return images, labels


READERS: dict[str, Callable[[Path, str], Images]] = {
    "python": read_python,
    "binary": read_binary,
    "mosaic": read_mosaic,
}


class _Inert:
    """Replaces numpy arrays and types in a pickled file. It keeps the stored state and does nothing with it."""

    state: Any = None

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _BytesUnpickler(pickle.Unpickler):
    """Accepts only the names that a pickled numpy array refers to, and replaces them."""

    names: dict[tuple[str, str], Callable[..., Any]] = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Inert,
        ("numpy._core.multiarray", "_reconstruct"): _Inert,
        ("numpy", "ndarray"): _Inert,
        ("numpy", "dtype"): _Inert,
    }

    def __init__(self, content: bytes) -> None:
        check_operations(io.BytesIO(content))
        self.left = value_limit(len(content))  # bytes that calls may copy
        super().__init__(io.BytesIO(content), encoding="bytes")

    def encode(self, text: str, *_: object) -> bytes:
        self.left -= len(text)
        if self.left < 0:
            raise pickle.UnpicklingError("it copies its values again and again")
        return text.encode("latin1")

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            if (module, name) == ("_codecs", "encode"):
                return self.encode
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed")
        return self.names[module, name]


def _python_batch(path: Path) -> Images:
    content = _read_bytes(path)
    try:
        batch = _BytesUnpickler(content).load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        _, shape, _, fortran, stored = batch["data"].state
        labels = np.array(batch["labels"], np.int64)
    except Exception as error:  # a damaged file may raise anything
        raise SmartpruneError(f"{path} cannot be read as a batch of CIFAR-10 ({error!r:.200}); {REPAIR}") from None
    complete = isinstance(stored, bytes) and not fortran and len(stored) == len(labels) * IMAGE_BYTES
    if not complete or tuple(shape) != (len(labels), IMAGE_BYTES):
        raise SmartpruneError(f"{path} holds {shape} values for {len(labels)} labels; {REPAIR}")
    return _channels_last(np.frombuffer(stored, np.uint8).reshape(shape)), _labels(labels, path)


def _tiles(path: Path) -> ByteArray:
    content = _read_bytes(path)
    try:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise SmartpruneError(f"{path} needs Pillow, which is not installed; run: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "WEBP", "PNG")) as image:
            check_pixels(image, len(content))
            mosaic = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SmartpruneError(f"{path} cannot be read as an image ({error}); {REPAIR}") from None
    height, width, _ = mosaic.shape
    if height % SIDE or width % SIDE:
        raise SmartpruneError(f"{path} has {width}x{height} pixels; a mosaic has multiples of {SIDE}; {REPAIR}")
    tiles = mosaic.reshape(height // SIDE, SIDE, width // SIDE, SIDE, CHANNELS).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(tiles.reshape(-1, SIDE, SIDE, CHANNELS))


def _read_bytes(path: Path) -> bytes:
    try:
        return read_limited(path, MAX_BYTES)
    except SmartpruneError as error:
        raise SmartpruneError(f"{error}; {REPAIR}") from None


def _channels_last(planes: ByteArray) -> ByteArray:
    """[n, 3 * 32 * 32], one plane per color, to [n, 32, 32, 3]."""
    return np.ascontiguousarray(planes.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1))


def _labels(values: NDArray[Any], path: Path) -> ByteArray:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise SmartpruneError(f"{path} holds an array of {values.ndim} axes of {values.dtype}, not one axis of integers; {REPAIR}")
    wrong = (values < 0) | (values >= CLASSES)
    if wrong.any():
        raise SmartpruneError(f"{path}: label {values[wrong][0]} is outside 0 to {CLASSES - 1}; {REPAIR}")
    return values.astype(np.uint8)


def _concatenate(parts: list[Images]) -> Images:
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
