"""Compiling and caching the kernels."""

from __future__ import annotations

import ctypes
import errno
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
from smartprune.runtime.cpu import build, store

SOURCE = Path(sp.__file__).parents[1]
PROBE = [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 1)",))]
COMPILE_PROBE = "build.open_library('probe', [build.Unit('probe.c', ('-DPROBES=PROBE(portable, 1)',))])"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    store.cache_folder.cache_clear()
    build.supported_sets.cache_clear()
    yield folder
    store.cache_folder.cache_clear()
    build.supported_sets.cache_clear()


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_CACHE", str(folder))
    store.cache_folder.cache_clear()


def replace(path: Path, content: bytes) -> None:
    """Writes a new file under the name of one that this process may have loaded."""
    path.unlink()
    path.write_bytes(content)


def script(path: Path, *lines: str) -> Path:
    """A shell script that takes the place of a compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


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


@pytest.mark.parametrize("kind", ["other user", "group can write", "everybody can write", "link", "pipe", "folder"])
def test_files_that_others_could_have_written_are_not_loaded(
    empty_cache: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.open_library("probe", PROBE)
    (library,) = empty_cache.glob("*.so")
    assert store.find(empty_cache, "*", ".so") == [library]
    content = library.read_bytes()
    if kind == "other user":
        if os.getuid() == 0:
            os.chown(library, 12345, -1)
        else:
            monkeypatch.setattr(store.os, "getuid", lambda: 12345)
    elif kind == "group can write":
        library.chmod(0o664)
    elif kind == "everybody can write":
        library.chmod(0o646)
    else:
        library.unlink()
        if kind == "link":
            (tmp_path / "target").write_bytes(content)
            library.symlink_to(tmp_path / "target")
        elif kind == "pipe":
            os.mkfifo(library)
        else:
            library.mkdir()
    assert store.find(empty_cache, "*", ".so") == []
    assert library.exists()  # it may be somebody's


def test_files_have_safe_permissions_whatever_the_umask_is(empty_cache: Path) -> None:
    before = os.umask(0)
    try:
        build.open_library("probe", PROBE)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in empty_cache.iterdir()} == {"0o644"}


def test_headers_belong_to_the_key_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "probe.c").write_text("PROBES")
    monkeypatch.setattr(build, "SOURCES", sources)
    before = PROBE[0].key
    (sources / "new.h").write_text("")
    assert PROBE[0].key != before


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


def test_unwritable_cache_falls_back_to_a_temporary_folder(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    use_cache(tmp_path / "file" / "below", monkeypatch)
    assert os.access(store.cache_folder(), os.W_OK)
    assert build.open_library("probe", PROBE).sp_has_portable() == 1


def test_a_read_only_cache_is_read(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.open_library("probe", PROBE)
    access = os.access  # root may write everywhere
    monkeypatch.setattr(store.os, "access", lambda path, mode: path != empty_cache and access(path, mode))
    store.cache_folder.cache_clear()
    assert store.cache_folder() == store.private_folder()
    loaded = build.open_library("probe", PROBE)
    assert Path(loaded._name).parent == empty_cache
    other = build.open_library("probe", [build.Unit("probe.c", ("-DPROBES=PROBE(portable, 3)",))])
    assert Path(other._name).parent == store.private_folder()


FULL = "No space left on device"


@pytest.mark.parametrize("disk", ["full for the compiler", "full for fsync", "read-only", "without programs"])
def test_a_disk_that_cannot_hold_the_cache_falls_back_to_a_temporary_folder(
    empty_cache: Path, tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disk == "full for the compiler":  # it leaves part of its output
        lines = 'case "$*" in', f'*{empty_cache}/*) echo x > "${{TMPDIR}}/a.o"; echo "cc: error: {FULL}" >&2; exit 1;;', "esac"
        monkeypatch.setenv("CC", str(script(tmp_path / "full-cc", *lines, 'exec cc "$@"')))
    elif disk == "full for fsync":
        fsync = store.os.fsync

        def failing(handle: int) -> None:
            if str(empty_cache) in os.readlink(f"/proc/self/fd/{handle}"):
                raise OSError(errno.ENOSPC, FULL)
            fsync(handle)

        monkeypatch.setattr(store.os, "fsync", failing)
    elif disk == "read-only":
        mkdtemp = store.tempfile.mkdtemp

        def refused(prefix: str, dir: Path | None = None) -> str:
            if dir == empty_cache:
                raise OSError(errno.EROFS, "Read-only file system")
            return mkdtemp(prefix=prefix, dir=dir)

        monkeypatch.setattr(store.tempfile, "mkdtemp", refused)
    else:
        load = build.ctypes.CDLL

        def not_loaded(path: str) -> ctypes.CDLL:
            if path.startswith(str(empty_cache)):
                raise OSError("failed to map segment from shared object")
            return load(path)

        monkeypatch.setattr(build.ctypes, "CDLL", not_loaded)
    loaded = build.open_library("probe", PROBE)
    assert loaded.sp_has_portable() == 1
    assert Path(loaded._name).parent == store.private_folder()
    assert not list(empty_cache.glob("build-*"))


def test_full_disks_everywhere_are_an_error(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "full-cc", f'echo "cc: error: {FULL}" >&2', "exit 1")))
    with pytest.raises(sp.SmartpruneError, match=rf"could not be stored and loaded \(cc: error: {FULL}\).*set SMARTPRUNE_CACHE"):
        build.open_library("probe", PROBE)


def test_unfinished_builds_of_killed_processes_are_removed(empty_cache: Path) -> None:
    empty_cache.mkdir(mode=0o700)
    for name, age in (("build-old", 2 * store.ABANDONED), ("build-new", 0.0)):
        (empty_cache / name).mkdir()
        (empty_cache / name / "part.o").write_text("")
        now = (empty_cache / name).stat().st_mtime
        os.utime(empty_cache / name, (now - age, now - age))
    build.open_library("probe", PROBE)
    assert [path.name for path in empty_cache.glob("build-*")] == ["build-new"]


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
        "import os; from smartprune.runtime.cpu import store; folder = store.cache_folder(); print(folder, flush=True)\n"
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
        "import atexit, multiprocessing; from smartprune.runtime.cpu import store\n"
        "context = multiprocessing.get_context('fork'); ends = context.Event(); atexit.register(ends.set)\n"
        "def child():\n"
        "    ends.wait(60); folder = store.cache_folder(); print(folder, folder.is_dir(), flush=True)\n"
        f"if {first == 'parent'}: store.cache_folder()\n"
        "context.Process(target=child).start()\n"
    )
    folder, exists = output_without_a_cache(code, tmp_path).split()
    assert exists == "True"
    assert not Path(folder).exists()


def test_cache_that_other_users_can_write_is_not_used(empty_cache: Path) -> None:
    empty_cache.mkdir()
    empty_cache.chmod(0o777)
    assert store.cache_folder() != empty_cache


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


def test_failing_compiler_is_an_error_with_its_message(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'internal error: out of ideas' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(sp.SmartpruneError, match=r"out of ideas.*set CC"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    assert not list(empty_cache.glob("*"))
