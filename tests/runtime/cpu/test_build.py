"""Compiling and caching the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding
from smartprune.runtime.cpu import build

SOURCE = Path(sp.__file__).parents[1]
PROBE = [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 1)",))]
COMPILE_PROBE = "build.open_library('probe', [build.Unit('probe.c', ('-DPROBES=PROBE(portable, 1)',))])"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    build.cache_folder.cache_clear()
    build.supported_sets.cache_clear()
    yield folder
    build.cache_folder.cache_clear()
    build.supported_sets.cache_clear()


def test_compiles_once_and_rebuilds_a_damaged_library(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.open_library("probe", PROBE).sp_has_portable() == 1
    (library,) = empty_cache.glob("*.so")
    before = library.stat().st_mtime_ns
    build.open_library("probe", PROBE)
    assert library.stat().st_mtime_ns == before
    assert oct(empty_cache.stat().st_mode & 0o777) == "0o700"
    other = tmp_path / "other"  # a path that the loader has not seen yet
    other.mkdir(mode=0o700)
    (other / library.name).write_bytes(b"\x7fELF")
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(other))
    build.cache_folder.cache_clear()
    assert build.open_library("probe", PROBE).sp_has_portable() == 1
    assert (other / library.name).stat().st_size == library.stat().st_size


def test_headers_belong_to_the_key_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "probe.c").write_text("PROBES")
    monkeypatch.setattr(build, "SOURCES", sources)
    before = PROBE[0].key(build.compiler())
    (sources / "new.h").write_text("")
    assert PROBE[0].key(build.compiler()) != before


def test_unwritable_cache_falls_back_to_a_temporary_folder(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(tmp_path / "file" / "below"))
    build.cache_folder.cache_clear()
    folder = build.cache_folder()
    assert os.access(folder, os.W_OK)
    assert build.open_library("probe", PROBE).sp_has_portable() == 1


def output_without_a_cache(code: str, tmp_path: Path) -> str:
    """What a program prints if the usual cache is not writable and temporary folders lie in ``tmp_path``."""
    (tmp_path / "file").write_text("")
    env = os.environ | {
        "PYTHONPATH": str(SOURCE),
        "SMARTPRUNE_CACHE": str(tmp_path / "file" / "below"),
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_temporary_cache_is_removed_when_its_process_ends(tmp_path: Path) -> None:
    code = (
        "import os; from smartprune.runtime.cpu import build; folder = build.cache_folder(); print(folder, flush=True)\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait(); assert folder.is_dir()"
    )
    output = output_without_a_cache(code, tmp_path)
    assert Path(output.strip()).parent == tmp_path
    assert not Path(output.strip()).exists()


@pytest.mark.parametrize("first", ["parent", "child"])
def test_temporary_cache_exists_until_child_processes_end(tmp_path: Path, first: str) -> None:
    """A process waits for its children before it removes the folder. A folder that a child creates is removed too."""
    code = (
        "import atexit, multiprocessing; from smartprune.runtime.cpu import build\n"
        "context = multiprocessing.get_context('fork'); ends = context.Event(); atexit.register(ends.set)\n"
        "def child():\n"
        "    ends.wait(60); folder = build.cache_folder(); print(folder, folder.is_dir(), flush=True)\n"
        f"if {first == 'parent'}: build.cache_folder()\n"
        "context.Process(target=child).start()\n"
    )
    folder, exists = output_without_a_cache(code, tmp_path).split()
    assert exists == "True"
    assert not Path(folder).exists()


def test_cache_that_other_users_can_write_is_not_used(empty_cache: Path) -> None:
    empty_cache.mkdir()
    empty_cache.chmod(0o777)
    assert build.cache_folder() != empty_cache


def test_processes_can_compile_at_the_same_time(empty_cache: Path) -> None:
    code = f"from smartprune.runtime.cpu import build; print({COMPILE_PROBE}.sp_has_portable())"
    env = os.environ | {"PYTHONPATH": str(SOURCE), "SMARTPRUNE_CACHE": str(empty_cache)}
    jobs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) for _ in range(3)]
    assert len({job.communicate()[0] for job in jobs}) == 1
    assert all(job.returncode == 0 for job in jobs)
    assert sorted(path.suffix for path in empty_cache.iterdir()) == [".o", ".so"]


def test_threads_can_compile_at_the_same_time(empty_cache: Path) -> None:
    build._load.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: id(build.load(isa="portable")), range(4)))) == 1
    assert not list(empty_cache.glob("*.part"))


def test_missing_compiler_is_an_error_and_the_reference_backend_works(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CC", raising=False)
    model = nn.Conv2d(3, 3, 1)
    with pytest.raises(sp.SmartpruneError, match=r"none of cc, gcc and clang.*backend=\"reference\""):
        sp.accelerate(model)
    x = torch.randn(1, 3, 4, 4)
    assert_equal_to_rounding(sp.accelerate(model, backend="reference")(x), model(x))
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(sp.SmartpruneError, match="CC=no-such-compiler is not a program"):
        sp.accelerate(model)


def test_failing_compiler_is_an_error_with_its_message(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'internal error: out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(sp.SmartpruneError, match=r"out of ideas.*set CC"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    assert not list(empty_cache.glob("*"))
