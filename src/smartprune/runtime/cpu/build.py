"""Building the kernels: compiled once per machine with the system's C compiler, kept in a cache, and loaded with ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

from ...errors import SmartpruneError
from . import abi
from .instruction_sets import INSTRUCTION_SETS, InstructionSet, of_this_architecture

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
OUTPUT = "{output}"  # placeholder for the file that a command writes
_BUILDING = threading.Lock()  # threads of one process would write the same files


@dataclass(frozen=True)
class Library:
    """The compiled kernels for one instruction set."""

    isa: InstructionSet
    code: ctypes.CDLL


def load(int8: bool = False, isa: str | None = None) -> Library:
    """The library for this machine. ``isa`` or $SMARTPRUNE_ISA selects another instruction set that the machine has."""
    if sys.byteorder != "little" or os.name != "posix":
        raise SmartpruneError(
            f"accelerate: the kernels support little-endian Linux and macOS, and this is {sys.platform}; "
            'pass backend="reference" to run slowly in torch'
        )
    name = isa or os.environ.get("SMARTPRUNE_ISA") or None
    with _BUILDING:
        supported = supported_sets()
        if name is None:
            name = next(reversed(supported))
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
        return _load(supported[name], int8)


@cache
def supported_sets() -> dict[str, InstructionSet]:
    """The instruction sets of this machine by name, the best one last."""
    rows = of_this_architecture()
    probes = " ".join(f"PROBE({row.name}, {row.probe})" for row in rows)
    probe = open_library("probe", [Unit("probe.c", (f"-DPROBES={probes}",))])
    return {row.name: row for row in rows if getattr(probe, f"sp_has_{row.name}")()}


@cache
def _load(isa: InstructionSet, int8: bool) -> Library:
    flags = (*isa.flags, *isa.definitions)
    units = [
        Unit("conv.c", (*flags, f"-DWIDTH={width}", f"-DQUANT={quantized}")) for quantized in range(1 + int8) for width in isa.lanes
    ]
    units += [Unit("ops.c", (*flags, f"-DWITH_INT8={int(int8)}")), Unit("pool.c", flags)]
    code = open_library(f"{isa.name}{'-int8' if int8 else ''}", units)
    abi.check(code, code._name)
    abi.declare(code)
    return Library(isa, code)


def compiler() -> str:
    """The C compiler: the one that $CC names, or the first of cc, gcc and clang."""
    setting = os.environ.get("CC", "").split()
    for name in setting[:1] or ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    reason = f"CC={setting[0]} is not a program" if setting else "none of cc, gcc and clang is installed"
    raise SmartpruneError(
        f"accelerate: a C compiler is needed once to build the kernels for this machine, and {reason}; install gcc or clang "
        'or set CC, or pass backend="reference" to run slowly in torch'
    )


@cache
def _compiler_version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, check=False).stdout.decode(errors="replace")


@dataclass(frozen=True)
class Unit:
    """A C source and the flags that it is compiled with."""

    source: str
    flags: tuple[str, ...]

    def key(self, compiler: str) -> str:
        """A hash of the source, the headers, the compiler and the flags."""
        files = [SOURCES / self.source, *sorted(SOURCES.glob("*.h"))]
        parts = [compiler, _compiler_version(compiler), repr((FLAGS, self.flags)), *(file.read_text() for file in files)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def open_library(name: str, units: list[Unit]) -> ctypes.CDLL:
    """Loads the library that consists of these units. Compiles what the cache does not have."""
    path = compiler()
    keys = [unit.key(path) for unit in units]
    folder = cache_folder()
    target = folder / f"runtime-{name}-{hashlib.sha256(''.join(keys).encode()).hexdigest()[:20]}.so"
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # truncated by a full disk, or from another system: rebuilt below
            pass
    objects = [folder / f"{unit.source}-{key}.o" for unit, key in zip(units, keys, strict=True)]
    compile_missing([[path, *FLAGS, *unit.flags, "-c", str(SOURCES / unit.source), "-o", OUTPUT] for unit in units], objects)
    _run_commands([([path, "-shared", "-o", OUTPUT, *map(str, objects), "-lm", "-lpthread"], target)])
    return ctypes.CDLL(str(target))


def compile_missing(commands: list[list[str]], targets: list[Path]) -> None:
    """Runs the commands whose target does not exist."""
    pairs = zip(commands, targets, strict=True)
    _run_commands([(command, target) for command, target in pairs if not target.exists()])


def _run_commands(commands: list[tuple[list[str], Path]]) -> None:
    """Runs commands in parallel. A target gets its name only when it is complete, so several processes may do this at once."""
    jobs = []
    for command, target in commands:
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        words = [str(part) if word == OUTPUT else word for word in command]
        jobs.append((words, part, target, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)))
    failures: list[tuple[list[str], str]] = []
    for words, part, target, job in jobs:
        errors = job.communicate()[1].decode(errors="replace")
        if job.returncode == 0:
            os.replace(part, target)
        else:
            part.unlink(missing_ok=True)
            failures.append((words, errors))
    if failures:
        words, errors = failures[0]
        lines = errors.strip().splitlines() or ["no message"]
        message = next((line for line in lines if "error" in line), lines[0])
        raise SmartpruneError(
            f"accelerate: the C compiler failed ({message}); the command was: {' '.join(words)}; set CC to gcc 9 or clang 11 "
            'or newer, or pass backend="reference" to run slowly in torch'
        )


@cache
def cache_folder() -> Path:
    """The folder of compiled kernels: $SMARTPRUNE_CACHE, else ~/.cache/smartprune.

    Its files are executed. If it is not writable, or other users could write to it, a private temporary folder is used.
    """
    setting = os.environ.get("SMARTPRUNE_CACHE")
    try:
        folder = Path(setting) if setting else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smartprune"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        is_private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
        if is_private and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        pass
    private = Path(tempfile.mkdtemp(prefix="smartprune-cache-"))
    # Only processes forked from this one use the folder, and this process waits for them before finalizers run. atexit does
    # not run in processes that multiprocessing started.
    Finalize(None, shutil.rmtree, (private, True), exitpriority=-100)
    return private
