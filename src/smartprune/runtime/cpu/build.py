"""Loading the kernels with ctypes: those of the wheel, or else compiled once per machine with the system's C compiler and kept in
a cache."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import SmartpruneError
from ..forks import ForkLock
from . import abi, store
from .instruction_sets import HALF_LANES, INSTRUCTION_SETS, InstructionSet, of_this_architecture

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"  # the libraries of a wheel, named after the hash of what they were compiled from
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
WINDOWS = "win32"  # sys.platform
COMPILERS = ("cc", "gcc", "clang")
COMPILERS_OF_WINDOWS = ("clang",)  # gcc does not align the stack for AVX there, and MSVC has no vector types
REFERENCE = 'pass backend="reference" to run slowly in torch'
UNWRITABLE = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
_BUILDING = ForkLock()  # threads of one process would write the same files


@dataclass(frozen=True)
class Library:
    """The compiled kernels for one instruction set."""

    isa: InstructionSet
    code: ctypes.CDLL


def flags_of(system: str) -> tuple[str, ...]:
    """The compiler's flags of all kernels."""
    return FLAGS if system == WINDOWS else (*FLAGS, "-fPIC")


def libraries_of(system: str) -> tuple[str, ...]:
    """The linker's flags of all kernels."""
    return () if system == WINDOWS else ("-lm", "-lpthread")


def load(dtype: str = "float32", isa: str | None = None) -> Library:
    """The library for this machine. ``isa`` or $SMARTPRUNE_ISA selects another instruction set that the machine has."""
    if sys.byteorder != "little":
        raise SmartpruneError(f"accelerate: the kernels support little-endian machines, and this one is big-endian; {REFERENCE}")
    name = isa or os.environ.get("SMARTPRUNE_ISA") or None
    with _BUILDING.lock:
        supported = supported_sets()
        if name is None:
            name = best_set(supported, dtype)
        if name not in {row.name for row in INSTRUCTION_SETS}:
            raise SmartpruneError(
                f"accelerate: SMARTPRUNE_ISA={name!r} is not one of {', '.join(row.name for row in INSTRUCTION_SETS)}; "
                "unset it to use the best one"
            )
        if name not in supported:
            raise SmartpruneError(
                f"accelerate: SMARTPRUNE_ISA={name!r} is not supported by this machine, which has {', '.join(supported)}; "
                "unset it to use the best one"
            )
        return _load(supported[name], dtype)


def best_set(supported: Mapping[str, InstructionSet], dtype: str) -> str:
    """The name of the instruction set that is used if none is given."""
    names = list(supported)
    multiplies = [name for name in names if dtype != "float16" or supported[name].half_pixels]
    return (multiplies or names)[-1]


@cache
def supported_sets() -> dict[str, InstructionSet]:
    """The instruction sets of this machine by name, the best one last."""
    rows = of_this_architecture()
    code = open_library("probe", [probe_of(rows)])
    return {row.name: row for row in rows if getattr(code, f"sp_has_{row.name}")()}


@cache
def _load(isa: InstructionSet, dtype: str) -> Library:
    code = open_library(library_name(isa, dtype), units_of(isa, dtype))
    abi.check(code, code._name)
    abi.declare(code)
    return Library(isa, code)


def library_name(isa: InstructionSet, dtype: str) -> str:
    return isa.name if dtype == "float32" else f"{isa.name}-{dtype}"


def units_of(isa: InstructionSet, dtype: str) -> list[Unit]:
    """What the library of an instruction set consists of."""
    flags = (*isa.flags, *isa.definitions)
    int8, float16 = int(dtype == "int8"), int(dtype == "float16")
    units = [
        Unit("conv.c", (*flags, f"-DWIDTH={width}", f"-DQUANT={quantized}")) for quantized in range(1 + int8) for width in isa.lanes
    ]
    if float16:
        units += [Unit("conv.c", (*flags, f"-DWIDTH={width}", "-DQUANT=0", "-DHALF=1")) for width in HALF_LANES]
    operations = Unit("ops.c", (*flags, f"-DWITH_INT8={int8}", f"-DWITH_FLOAT16={float16}"))
    return [*units, operations, Unit("pool.c", flags)]


def probe_of(rows: Sequence[InstructionSet]) -> Unit:
    """The source that tells which of these instruction sets a machine has."""
    probes = " ".join(f"PROBE({row.name}, {row.probe})" for row in rows)
    return Unit("probe.c", (f"-DPROBES={probes}",))


class _UnwritableError(OSError):
    """The disk of a folder is full or read-only."""


def compiler() -> tuple[str, ...]:
    """The command of the C compiler: that in $CC, which may have arguments, or the first of cc, gcc and clang. On Windows, it is
    clang."""
    setting, names = os.environ.get("CC", ""), COMPILERS_OF_WINDOWS if sys.platform == WINDOWS else COMPILERS
    try:
        words = shlex.split(setting.replace("\\", "/") if sys.platform == WINDOWS else setting)
    except ValueError as error:
        raise SmartpruneError(
            f"accelerate: CC={setting!r} is not a command ({error}); set CC to gcc or clang, or {REFERENCE}"
        ) from None
    for name in words[:1] or names:
        if path := shutil.which(name):
            return path, *words[1:]
    windows = sys.platform == WINDOWS
    missing = "clang is not installed" if windows else "none of cc, gcc and clang is installed"
    reason = f"CC={words[0]} is not a program" if words else missing
    raise SmartpruneError(
        f"accelerate: a C compiler is needed once to build the kernels for this machine, and {reason}; install "
        f"{'clang' if windows else 'gcc or clang'} or set CC, or {REFERENCE}"
    )


def compiler_key(command: Sequence[str]) -> str:
    """A hash of the command and of the programs that it names, so that a new version of the compiler builds the kernels again."""
    parts = list(command)
    for word in command:
        if path := shutil.which(word):
            status = os.stat(path)
            parts.append(f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}")
    return _hash(parts)[:8]


@dataclass(frozen=True)
class Unit:
    """A C source and the flags that it is compiled with."""

    source: str
    flags: tuple[str, ...]

    def key(self, system: str = sys.platform, machine: str | None = None) -> str:
        """A hash of the source, the headers, the flags and the kind of machine."""
        files = [SOURCES / self.source, *sorted(SOURCES.glob("*.h"))]
        flags = repr((flags_of(system), self.flags))
        return _hash([system, machine or platform.machine(), flags, *(file.read_text() for file in files)])


def stem_of(name: str, units: Sequence[Unit], system: str = sys.platform, machine: str | None = None) -> str:
    """The name of a library for a kind of machine. It contains a hash of everything that the library is compiled from."""
    return f"runtime-{name}-{_hash([unit.key(system, machine) for unit in units])}"


def _hash(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def open_library(name: str, units: Sequence[Unit]) -> ctypes.CDLL:
    """Loads the library that consists of these units: that of the wheel, or that in the cache. Otherwise it is built.

    Neither needs a compiler. If $CC names one, that of the wheel is not used. If there is one, only libraries in the cache that it
    built are used.
    """
    stem = stem_of(name, units)
    prebuilt = PREBUILT / f"{stem}.so"
    if prebuilt.exists() and not os.environ.get("CC"):
        with suppress(OSError):  # it does not load on this system
            return ctypes.CDLL(str(prebuilt))
    try:
        command = compiler()
    except SmartpruneError:
        code = _load_kept(f"{stem}-*")
        if code is None:
            raise
        return code
    built_by = compiler_key(command)
    code = _load_kept(f"{stem}-{built_by}")
    if code is not None:
        return code
    failures: list[str] = []
    for folder in (store.cache_folder, store.private_folder):
        try:
            return ctypes.CDLL(str(_build(folder(), f"{stem}-{built_by}", units, command, built_by)))
        except OSError as error:  # the disk is full or read-only, or does not allow programs
            if (failure := str(error)) not in failures:
                failures.append(failure)
    raise SmartpruneError(
        f"accelerate: the compiled kernels could not be stored and loaded ({'; '.join(failures)}); they need a folder with a few "
        f"megabytes of space from which programs may run; set SMARTPRUNE_CACHE or TMPDIR to one, or {REFERENCE}"
    )


def _load_kept(stem: str) -> ctypes.CDLL | None:
    """The newest library with this stem in the cache that loads here."""
    for folder in store.readable_folders():
        for path in store.find(folder, stem, ".so"):
            try:
                return ctypes.CDLL(str(path))
            except OSError:  # from another system that shares the folder
                continue
    return None


def _build(folder: Path, stem: str, units: Sequence[Unit], command: Sequence[str], built_by: str) -> Path:
    """Compiles the units that the folder lacks, and links all of them to a library. Raises OSError if the disk is full."""
    names = [f"{unit.source}-{unit.key()}-{built_by}" for unit in units]
    kept = {name: files[0] for name in names if (files := store.find(folder, name, ".o"))}
    with store.workspace(folder) as work:
        missing = {name: unit for name, unit in zip(names, units, strict=True) if name not in kept}
        parts = {name: work / f"{name}.o" for name in missing}
        run_commands(
            work,
            [
                [*command, *flags_of(sys.platform), *unit.flags, "-c", str(SOURCES / unit.source), "-o", str(parts[name])]
                for name, unit in missing.items()
            ],
        )
        kept |= {name: store.keep(part, folder, name, ".o") for name, part in parts.items()}
        library = work / "library.so"
        run_commands(
            work, [[*command, "-shared", "-o", str(library), *(str(kept[name]) for name in names), *libraries_of(sys.platform)]]
        )
        return store.keep(library, folder, stem, ".so")


def run_commands(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Runs commands in parallel. Their temporary files go to ``folder``."""
    temporary = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(folder))
    settings = os.environ | temporary | {"LC_ALL": "C"}  # errors of the disk are recognized by their English text
    jobs: list[tuple[Sequence[str], subprocess.Popen[bytes]]] = []
    failures: list[tuple[Sequence[str], str]] = []
    try:
        for words in commands:
            try:
                job = subprocess.Popen(words, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            except OSError as error:  # not a program of this machine
                failures.append((words, f"error: {error}"))
                break
            jobs.append((words, job))
        for words, job in jobs:
            errors = job.communicate()[1].decode(errors="replace")
            if job.returncode:
                failures.append((words, errors))
    finally:
        for _, job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    if not failures:
        return
    words, errors = failures[0]
    lines = errors.strip().splitlines() or ["no message"]
    message = next((line for line in lines if "error" in line), lines[0])
    if any(text in errors for text in UNWRITABLE):
        raise _UnwritableError(message)
    raise SmartpruneError(
        f"accelerate: the C compiler failed ({message}); the command was: {shlex.join(words)}; set CC to gcc 9 or clang 11 "
        f"or newer, or {REFERENCE}"
    )
