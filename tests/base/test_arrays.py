"""Arrays are read as numpy reads them, and files that lie or never end are refused."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from smartprune import SmartpruneError
from smartprune.arrays import read_array


def with_header(text: str, data: bytes) -> bytes:
    header = text.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize("dtype", ["u1", "<f4", ">f8", "?", "<i8"])
def test_arrays_are_those_of_numpy(dtype: str, tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for array in (values, values.T, values[:0]):
        np.save(tmp_path / "x.npy", array)
        assert np.array_equal(read_array(tmp_path / "x.npy", ""), array)


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1, 4)", "(10, 10**3)", "(2000,)", "('a',)"])
def test_shapes_that_lie_are_refused(shape: str, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(with_header(f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}", bytes(100)))
    with pytest.raises(SmartpruneError, match=r"x\.npy cannot be read as an \.npy array \(.*\); save it again"):
        read_array(tmp_path / "x.npy", "save it again")


def test_objects_and_archives_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    archive = io.BytesIO()
    np.savez(archive, a=np.zeros(3))
    (tmp_path / "archive.npy").write_bytes(archive.getvalue())
    for name in ("objects.npy", "archive.npy", "missing.npy"):
        with pytest.raises(SmartpruneError, match=f"{name} cannot be read"):
            read_array(tmp_path / name, "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "zero.npy").symlink_to("/dev/zero")
    for name in ("pipe.npy", "zero.npy"):
        with pytest.raises(SmartpruneError, match=r"it is a (pipe|device)"):
            read_array(tmp_path / name, "")
