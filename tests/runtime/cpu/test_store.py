"""The cache of compiled kernels: which folders and files are trusted, and what a full disk does."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smartprune as sp
from helpers.kernel_cache import PROBE, SOURCE, script, use_cache
from smartprune.runtime.cpu import build, store


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
    assert library.exists()  # it may belong to another program


def test_files_have_safe_permissions_whatever_the_umask_is(empty_cache: Path) -> None:
    before = os.umask(0)
    try:
        build.open_library("probe", PROBE)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in empty_cache.iterdir()} == {"0o644"}


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


def test_the_cache_works_without_what_windows_lacks(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No owners, no folders on the disk, and no flags of files: simulated, because the tests do not run on Windows."""
    for name in ("getuid", "fchmod"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(store, "OPEN_FLAGS", os.O_RDONLY)
    monkeypatch.setattr(store, "DIRECTORY", None)
    part = store.cache_folder() / "part"
    part.write_bytes(b"kernels")
    path = store.keep(part, part.parent, "runtime", ".so")
    assert path.parent == empty_cache == store.shared_folder()
    assert store.find(empty_cache, "runtime", ".so") == [path]
    path.write_bytes(b"damaged")
    assert store.find(empty_cache, "runtime", ".so") == []
