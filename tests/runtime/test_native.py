"""The compiled half: built once, kept, rebuilt when damaged, refused in words; and every instruction set this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.cpu import native
from smartprune.runtime.cpu.entries import cut

SOURCE = Path(sp.__file__).parents[1]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    native.cache_folder.cache_clear()
    native._best.cache_clear()
    yield folder
    native.cache_folder.cache_clear()
    native._best.cache_clear()


def isas() -> list[str]:
    try:
        return list(native.ISAS)[: native._best() + 1]
    except sp.SmartpruneError:
        return []


@pytest.mark.parametrize("isa", isas())
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_ISA", isa)
    model = randomly_pruned(
        nn.Sequential(nn.Conv2d(20, 40, 3, padding=1), nn.SiLU(), nn.Conv2d(40, 24, 3, 2), nn.ReLU()), 0.5, (8, 4)
    )
    fast = sp.accelerate(model, threads=1)
    assert isa in repr(fast)
    with torch.no_grad():
        for batch, width in ((1, 21), (3, 8)):
            x = torch.randn(batch, 20, 9, width)
            assert_equal_to_rounding(fast(x), model(x))


def test_compiled_once_and_rebuilt_if_damaged(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [native.Unit("probe.c", ())]
    assert native._open("probe", units).sp_isa() >= 0
    (made,) = fresh.glob("*.so")
    before = made.stat().st_mtime_ns
    native._open("probe", units)
    assert made.stat().st_mtime_ns == before
    assert oct(fresh.stat().st_mode & 0o777) == "0o700"
    other = tmp_path / "other"  # where the loader has not seen the file yet
    other.mkdir(mode=0o700)
    (other / made.name).write_bytes(b"\x7fELF")
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(other))
    native.cache_folder.cache_clear()
    assert native._open("probe", units).sp_isa() >= 0
    assert (other / made.name).stat().st_size == made.stat().st_size


def test_the_cache_may_be_unwritable(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(tmp_path / "file" / "below"))
    native.cache_folder.cache_clear()
    folder = native.cache_folder()
    assert os.access(folder, os.W_OK)
    assert native._open("probe", [native.Unit("probe.c", ())]).sp_isa() >= 0


def told_without_a_cache(code: str, tmp_path: Path) -> str:
    """What a program prints where the usual cache cannot be written, and a private one lies in ``tmp_path``."""
    (tmp_path / "file").write_text("")
    env = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "SMARTPRUNE_CACHE": str(tmp_path / "file" / "below"),
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_a_private_cache_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os; from smartprune.runtime import native; folder = native.cache_folder(); print(folder, flush=True)\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait(); assert folder.is_dir()"
    )
    told = told_without_a_cache(code, tmp_path)
    assert Path(told.strip()).parent == tmp_path
    assert not Path(told.strip()).exists()


@pytest.mark.parametrize("first", ["parent", "child"])
def test_a_private_cache_and_multiprocessing(tmp_path: Path, first: str) -> None:
    """At its end a process waits for those it started: the folder stays until then. One that such a process made goes as well."""
    code = (
        "import atexit, multiprocessing; from smartprune.runtime import native\n"
        "context = multiprocessing.get_context('fork'); ends = context.Event(); atexit.register(ends.set)\n"
        "def child():\n"
        "    ends.wait(60); folder = native.cache_folder(); print(folder, folder.is_dir(), flush=True)\n"
        f"if {first == 'parent'}: native.cache_folder()\n"
        "context.Process(target=child).start()\n"
    )
    told = told_without_a_cache(code, tmp_path)
    folder, there = told.split()
    assert there == "True"
    assert not Path(folder).exists()


def test_a_cache_that_others_may_write_is_not_trusted(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    assert native.cache_folder() != fresh


def test_two_processes_may_compile_at_once(fresh: Path) -> None:
    code = "from smartprune.runtime import native; print(native._open('probe', [native.Unit('probe.c', ())]).sp_isa())"
    env = os.environ | {"PYTHONPATH": str(SOURCE), "SMARTPRUNE_CACHE": str(fresh)}
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    assert len({job.communicate()[0] for job in jobs}) == 1
    assert all(job.returncode == 0 for job in jobs)
    assert sorted(path.suffix for path in fresh.iterdir()) == [".o", ".so"]


def test_threads_may_compile_at_once(fresh: Path) -> None:
    native._load.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: id(native.load(isa="portable")), range(4)))) == 1
    assert not list(fresh.glob("*.part"))


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CC", raising=False)
    model = nn.Conv2d(3, 3, 1)
    with pytest.raises(sp.SmartpruneError, match=r"none of cc, gcc and clang.*backend=\"reference\""):
        sp.accelerate(model)
    x = torch.randn(1, 3, 4, 4)
    assert_equal_to_rounding(sp.accelerate(model, backend="reference")(x), model(x))
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(sp.SmartpruneError, match="CC=no-such-compiler is not a program"):
        sp.accelerate(model)


def test_a_compiler_that_fails(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'internal error: out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(sp.SmartpruneError, match=r"out of ideas.*set CC"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    assert not list(fresh.glob("*"))


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_ISA", "sse9")
    with pytest.raises(sp.SmartpruneError, match=r"'sse9' is not one of portable, avx2"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    monkeypatch.setenv("SMARTPRUNE_ISA", "avx2")
    monkeypatch.setattr(native, "_best", lambda: 0)
    with pytest.raises(sp.SmartpruneError, match="more than this machine has: portable"):
        sp.accelerate(nn.Conv2d(3, 3, 1))


def test_entries_follow_the_order_of_a_packed_file() -> None:
    """Sorted by group of output channels, kernel position and input channels; the output channel fastest."""
    weight = np.zeros((40, 23, 2, 2), np.float32)
    kept = {(1, 0, 1, 8), (0, 1, 0, 16), (0, 0, 1, 0), (0, 0, 1, 8), (2, 1, 1, 0)}  # group, row, column, first channel
    rng = np.random.default_rng(0)
    for group, row, column, channel in kept:
        part = weight[16 * group : 16 * group + 16, channel : channel + 8, row, column]
        part[:] = rng.normal(size=part.shape)
    entries = cut(weight, (16,))
    assert (entries.lanes, entries.inner) == (16, 8)
    assert entries.start.tolist() == [0, 3, 4, 5]
    order = sorted(kept)
    assert list(zip(entries.row.tolist(), entries.column.tolist(), entries.channel.tolist(), strict=True)) == [k[1:] for k in order]
    for values, (group, row, column, channel) in zip(entries.values, order, strict=True):
        part = weight[16 * group : 16 * group + 16, channel : channel + 8, row, column]
        assert values.shape == (8, 16)
        assert (values[: part.shape[1], : part.shape[0]] == part.T).all()
        assert not values[part.shape[1] :].any()
        assert not values[:, part.shape[0] :].any()
    assert cut(np.zeros_like(weight), (16, 8)).count == 0


@pytest.mark.parametrize(
    ("block", "lanes", "inner"), [((16, 8), 16, 8), ((8, 8), 8, 8), ((16, 16), 16, 8), ((16, 4), 16, 4), ((8, 1), 8, 1)]
)
def test_the_cut_follows_the_block(block: tuple[int, int], lanes: int, inner: int) -> None:
    grid = sp.Block(*block).grid((128, 128, 3, 3))
    weight = torch.randn(128, 128, 3, 3) * grid.expand((torch.rand(grid.n) > 0.9).float())
    entries = cut(weight.numpy(), (16, 8))
    assert (entries.lanes, entries.inner) == (lanes, inner)
    assert entries.count * lanes * inner == int((weight != 0).sum())
