"""Python and C must agree on names, numbers and layouts. These tests break that on purpose."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from smartprune import SmartpruneError
from smartprune.runtime.cpu import abi, build


@pytest.fixture(scope="module")
def code() -> ctypes.CDLL:
    return build.load(isa="portable").code


def test_the_library_matches(code: ctypes.CDLL) -> None:
    abi.check(code, "kernels.so")


@pytest.mark.parametrize("table", ["OPERATIONS", "ACTIVATIONS", "ADDITIONS", "TYPES"])
def test_other_names_are_an_error(table: str, code: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    names: tuple[str, ...] = getattr(abi, table)
    for wrong in (names[::-1], names[:-1], (*names, "new")):
        monkeypatch.setattr(abi, table, wrong)
        with pytest.raises(SmartpruneError, match=rf"kernels\.so do not match .* its {table.lower()} are .* the cache is stale"):
            abi.check(code, "kernels.so")


def test_another_layout_is_an_error(code: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    class Op(abi.Op):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(abi, "Op", Op)
    with pytest.raises(SmartpruneError, match=r"its structure Op has \d+ bytes, expected \d+ bytes; the cache is stale"):
        abi.check(code, "kernels.so")


def test_swapped_operations_in_c_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, every addition would be a multiplication."""
    for file in build.SOURCES.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("X(ADD) X(MULTIPLY)", "X(MULTIPLY) X(ADD)"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    definitions = ("-DQUANTUM_BYTES=2", "-DMOST_PIXELS=6", "-DHAS_WIDTH_16=0")
    with_stubs = tmp_path / "stubs.c"
    with_stubs.write_text('#include "pool.c"\nvoid sp_work(const Op *op, int item, const External *external) {}\n')
    broken = build.open_library("broken", [build.Unit("stubs.c", definitions)])
    with pytest.raises(SmartpruneError, match=r"its operations are .*multiply, add, .* expected .*add, multiply, "):
        abi.check(broken, "kernels.so")


def test_a_library_without_names_is_an_error() -> None:
    with pytest.raises(SmartpruneError, match="its operations are missing"):
        abi.check(build.open_library("probe", [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 1)",))]), "kernels.so")
