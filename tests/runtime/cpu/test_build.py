"""Compiling and caching the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.kernel_cache import PROBE, SOURCE, script
from helpers.pruned_models import assert_equal_to_rounding
from smartprune.runtime.cpu import build, store

COMPILE_PROBE = "build.open_library('probe', [build.Unit('probe.c', ('-DPROBES=PROBE(portable, 1)',))])"


def replace(path: Path, content: bytes) -> None:
    """Writes a new file under the name of one that this process may have loaded."""
    path.unlink()
    path.write_bytes(content)


def test_compiles_once(empty_cache: Path) -> None:
    assert build.open_library("probe", PROBE).sp_has_portable() == 1
    (library,) = empty_cache.glob("*.so")
    before = library.stat().st_mtime_ns
    build.open_library("probe", PROBE)
    assert library.stat().st_mtime_ns == before
    assert oct(empty_cache.stat().st_mode & 0o777) == "0o700"
    assert sorted(path.suffix for path in empty_cache.iterdir()) == [".o", ".so"]


@pytest.mark.parametrize("suffix", [".so", ".o"])
def test_a_damaged_file_is_rebuilt(empty_cache: Path, suffix: str) -> None:
    """Loading a truncated library ends the process with SIGBUS, and linking a truncated object fails."""
    build.open_library("probe", PROBE)
    code = f"""
import os, pathlib
from smartprune.runtime.cpu import build
for left in (0, 4, 4096, -1):
    (damaged,) = pathlib.Path({str(empty_cache)!r}).glob("*{suffix}")
    intact = damaged.read_bytes()
    for path in pathlib.Path({str(empty_cache)!r}).glob("*.so"):
        path.unlink()
    damaged.unlink(missing_ok=True)  # a new file, because this process may have loaded the old one
    damaged.write_bytes(intact[:left])
    print({COMPILE_PROBE}.sp_has_portable(), damaged.read_bytes() == intact)
"""
    env = os.environ | {"PYTHONPATH": str(SOURCE), "SMARTPRUNE_CACHE": str(empty_cache)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "1 True\n" * 4, done.stderr
    assert not list(empty_cache.glob("build-*"))


def test_a_changed_byte_is_damage(empty_cache: Path) -> None:
    build.open_library("probe", PROBE)
    (library,) = empty_cache.glob("*.so")
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    replace(library, content)
    assert store.find(empty_cache, "runtime-probe-*", ".so") == []
    assert not library.exists()


def test_headers_belong_to_the_key_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "probe.c").write_text("PROBES")
    monkeypatch.setattr(build, "SOURCES", sources)
    before = PROBE[0].key()
    (sources / "new.h").write_text("")
    assert PROBE[0].key() != before


def test_a_warm_cache_needs_no_compiler(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.open_library("probe", PROBE)
    monkeypatch.setenv("PATH", str(tmp_path))
    for setting in ("", "no-such-compiler -O2", "unbalanced 'quote"):
        monkeypatch.setenv("CC", setting)
        assert build.open_library("probe", PROBE).sp_has_portable() == 1
    with pytest.raises(sp.SmartpruneError, match=r"a C compiler is needed once|is not a command"):
        build.open_library("probe", [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 2)",))])


def test_a_new_version_of_the_compiler_builds_again(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path / "my-cc", 'exec cc "$@"')
    monkeypatch.setenv("CC", str(path))
    build.open_library("probe", PROBE)
    (library,) = empty_cache.glob("*.so")
    script(path, "# version 2", 'exec cc "$@"')
    build.open_library("probe", PROBE)
    assert len(list(empty_cache.glob("*.so"))) == 2
    assert library.exists()


def test_the_compiler_may_have_arguments(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in CC="ccache gcc -O2"."""
    wrapper = script(tmp_path / "wrapper", f'echo "$1 $2 $3" >> {tmp_path}/log', 'exec "$@"')
    monkeypatch.setenv("CC", f"'{wrapper}' cc -O2 '-DUNUSED=a b'")
    assert build.open_library("probe", PROBE).sp_has_portable() == 1
    assert (tmp_path / "log").read_text() == "cc -O2 -DUNUSED=a b\n" * 2
    with_arguments = {path.name for path in empty_cache.glob("*.so")}
    monkeypatch.setenv("CC", f"'{wrapper}' cc -O1")
    build.open_library("probe", PROBE)
    assert {path.name for path in empty_cache.glob("*.so")} > with_arguments  # other arguments, another library


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
    assert not list(empty_cache.glob("build-*"))


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


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="this system does not list the features of its processor")
def test_supported_sets_are_those_that_the_system_lists() -> None:
    """The probe reads registers of the processor itself. Linux lists a feature if it also saves its registers."""
    listed = set(Path("/proc/cpuinfo").read_text().split())
    needed = {
        "avx2": {"avx2", "fma"},
        "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512vnni": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
        "neon_dot": {"asimddp"},
        "neon_i8mm": {"asimddp", "i8mm"},
    }
    supported = build.supported_sets()
    for row in build.of_this_architecture():
        assert (row.name in supported) == (needed.get(row.name, set()) <= listed), row.name


def test_flags_and_compilers_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcc does not align the stack for AVX there, and position independence and libm are no options of clang."""
    assert "-fPIC" in build.flags_of("linux")
    assert "-fPIC" not in build.flags_of(build.WINDOWS)
    assert build.libraries_of(build.WINDOWS) == ()
    programs = {"gcc": "C:/gcc.exe", "clang": "C:/clang.exe", "C:/tools/gcc": "C:/tools/gcc.exe"}
    monkeypatch.setattr(build.shutil, "which", programs.get)
    monkeypatch.setattr(build.sys, "platform", build.WINDOWS)
    monkeypatch.delenv("CC", raising=False)
    assert build.compiler() == ("C:/clang.exe",)
    monkeypatch.setenv("CC", r"'C:\tools\gcc' -O2")
    assert build.compiler() == ("C:/tools/gcc.exe", "-O2")
    monkeypatch.delenv("CC")
    del programs["clang"]
    with pytest.raises(sp.SmartpruneError, match="clang is not installed; install clang or set CC"):
        build.compiler()


def test_failing_compiler_is_an_error_with_its_message(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'internal error: out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(sp.SmartpruneError, match=r"out of ideas.*set CC"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    assert not list(empty_cache.glob("*"))


def test_the_libraries_of_a_wheel_need_no_compiler(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used if they were compiled from the same sources, and nothing is compiled."""
    rows = build.of_this_architecture()
    portable = build.units_of(rows[0], "float32")
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    for name, units in (("probe", [build.probe_of(rows)]), ("portable", portable)):
        code = build.open_library(name, units)
        shutil.copy(code._name, prebuilt / f"{build.stem_of(name, units)}.so")
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(tmp_path / "unused"))
    monkeypatch.setenv("SMARTPRUNE_ISA", "portable")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for function in (store.cache_folder, build.supported_sets, build._load):
        function.cache_clear()
    model, x = nn.Conv2d(3, 3, 1), torch.randn(1, 3, 4, 4)
    assert_equal_to_rounding(sp.accelerate(model, backend="native")(x), model(x))
    assert not (tmp_path / "unused").exists()
    monkeypatch.setenv("CC", "no-such-compiler")  # a compiler that the user chose comes first
    with pytest.raises(sp.SmartpruneError, match="a C compiler is needed once"):
        build.open_library("portable", portable)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    with pytest.raises(sp.SmartpruneError, match="a C compiler is needed once"):
        build.open_library("portable", portable)
    build._load.cache_clear()


def test_a_library_of_a_wheel_that_does_not_load_is_compiled(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / f"{build.stem_of('probe', PROBE)}.so").write_bytes(b"for another system")
    assert build.open_library("probe", PROBE).sp_has_portable() == 1
    assert list(empty_cache.glob("*.so"))
