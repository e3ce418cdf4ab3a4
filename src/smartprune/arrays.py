"""Arrays of numpy in ``.npy`` files, which are not trusted."""

from __future__ import annotations

import math
import os
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import SmartpruneError
from .files import file_size, open_regular


def read_array(path: str | os.PathLike[str], hint: str) -> NDArray[Any]:
    """The array in a file. The header must not claim more numbers than the file has, and objects are not unpickled.

    ``hint`` says what to do if the file is damaged.
    """
    try:
        with open_regular(path) as file:
            _check_header(file)
            file.seek(0)
            return np.asarray(np.load(file, allow_pickle=False))
    except Exception as error:  # a damaged header may raise anything
        reason = (str(getattr(error, "strerror", None) or error).splitlines() or [type(error).__name__])[0][:200]
        raise SmartpruneError(f"{os.fspath(path)} cannot be read as an .npy array ({reason}); {hint}") from None


def _check_header(file: BinaryIO) -> None:
    version = np.lib.format.read_magic(file)  # raises for .npz files, among others
    if version not in ((1, 0), (2, 0)):
        raise ValueError("it is of a version that names its columns")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds objects instead of numbers")
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize > file_size(file) - file.tell():
        raise ValueError(f"it has the shape {list(shape)[:8]}, and is too short for it")
