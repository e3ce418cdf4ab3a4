"""The C half of the runtime: compiled once per machine with the system's compiler, kept in a cache, loaded by ctypes."""

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
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
ISAS: dict[str, tuple[str, ...]] = {  # in the order in which csrc/probe.c numbers them
    "portable": (),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
}
_KINDS = ("import", "export", "conv", "depthwise", "max_pool", "average_pool", "mean")  # these and the next as in runtime.h
_POINTWISE = ("unary", "affine", "add", "multiply", "copy", "shift", "upsample", "bilinear")
KIND = {name: i for i, name in enumerate((*_KINDS, *_POINTWISE))}
FLOAT32, QUANTUM = 0, 1
ACTIVATION = {name: i for i, name in enumerate(("clamp", "silu", "sigmoid", "hardswish", "hardsigmoid", "leaky", "gelu"))}
ADDING = {"none": 0, "before": 1, "after": 2}


class Tensor(ctypes.Structure):
    """An activation, as runtime.h has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("image", "plane", "row")),
        *((name, ctypes.c_int32) for name in ("images", "blocks", "height", "width", "channels", "type")),
        ("scale", ctypes.c_float),
        ("zero", ctypes.c_float),
    )


class Op(ctypes.Structure):
    """An operation, as runtime.h has it."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "activation", "adding", "items")),
        *((name, ctypes.c_float) for name in ("low", "high", "slope")),
        ("inner", ctypes.c_int32),
        *((name, Tensor) for name in ("x", "y", "z")),
        *((name, ctypes.c_int32) for name in ("groups", "groups_per_item", "chunks", "lanes")),
        *(
            (name, ctypes.c_void_p)
            for name in ("start", "offset", "weight", "bias", "scale", "begin", "run", "chunk", "in_", "out", "side")
        ),
        *((name, ctypes.c_int32) for name in ("kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "include", "port")),
    )


class External(ctypes.Structure):
    """A tensor of the caller, as runtime.h has it."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("image", "channel", "row", "column")))


_BUILDING = threading.Lock()  # threads of one process would write the same files


@dataclass(frozen=True)
class Library:
    """The compiled kernels for one instruction set."""

    isa: str
    code: ctypes.CDLL

    @property
    def lanes(self) -> tuple[int, ...]:
        """How many output channels a kernel may hold in a register."""
        return (16, 8) if self.isa.startswith("avx512") else (8,)

    @property
    def pixels(self) -> int:
        """The most pixels of a tile."""
        return int(self.code.sp_most_pixels())

    @property
    def quantum_bytes(self) -> int:
        """Bytes of a quantized activation: one where four products are one instruction, else two."""
        return 1 if self.code.sp_has_bytes() else 2


def compiler() -> str:
    """The C compiler: what $CC names, or the first of cc, gcc and clang."""
    asked = os.environ.get("CC", "").split()
    for name in asked[:1] or ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    given = f"CC={asked[0]} is not a program" if asked else "none of cc, gcc and clang is installed"
    raise SmartpruneError(
        f"accelerate: a C compiler is needed once to build the kernels for this machine, and {given}; install gcc or clang "
        'or set CC, or pass backend="reference" for a slow run in torch'
    )


def load(int8: bool = False, isa: str | None = None) -> Library:
    """The library for this machine; ``isa`` or $SMARTPRUNE_ISA forces a lesser instruction set."""
    if sys.byteorder != "little" or os.name != "posix":
        raise SmartpruneError(
            f"accelerate: the kernels are written for little-endian Linux and macOS, and this is {sys.platform}; "
            'pass backend="reference" for a slow run in torch'
        )
    wanted = isa or os.environ.get("SMARTPRUNE_ISA") or None
    names = list(ISAS)
    with _BUILDING:
        best = _best()
        if wanted is None:
            wanted = names[best]
        if wanted not in ISAS:
            raise SmartpruneError(f"SMARTPRUNE_ISA={wanted!r} is not one of {', '.join(ISAS)}")
        if names.index(wanted) > best:
            raise SmartpruneError(f"SMARTPRUNE_ISA={wanted!r} is more than this machine has: {names[best]}")
        return _load(wanted, int8)


@cache
def _best() -> int:
    probe = _open("probe", [Unit("probe.c", ())])
    return int(probe.sp_isa())


@cache
def _load(isa: str, int8: bool) -> Library:
    widths = (16, 8) if isa.startswith("avx512") else (8,)
    units = [Unit("conv.c", (*ISAS[isa], f"-DWIDTH={width}", "-DQUANT=0")) for width in widths]
    if int8:
        units += [Unit("conv.c", (*ISAS[isa], f"-DWIDTH={width}", "-DQUANT=1")) for width in widths]
    units += [Unit("ops.c", (*ISAS[isa], f"-DWITH_INT8={int(int8)}")), Unit("pool.c", ISAS[isa])]
    code = _open(f"{isa}{'-int8' if int8 else ''}", units)
    code.sp_pool_new.restype = ctypes.c_void_p
    code.sp_pool_new.argtypes = (ctypes.c_int,)
    code.sp_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    code.sp_run.restype = None
    if code.sp_op_size() != ctypes.sizeof(Op):
        raise SmartpruneError(f"{isa}: the kernels and native.py disagree on an operation's layout; reinstall smartprune")
    return Library(isa, code)


@dataclass(frozen=True)
class Unit:
    """A source and the flags that it is compiled with."""

    source: str
    flags: tuple[str, ...]

    def key(self, cc: str) -> str:
        """Changes with the source, the compiler and the flags."""
        parts = [
            cc,
            _version(cc),
            repr((FLAGS, self.flags)),
            (SOURCES / self.source).read_text(),
            (SOURCES / "runtime.h").read_text(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@cache
def _version(cc: str) -> str:
    return subprocess.run([cc, "--version"], capture_output=True, check=False).stdout.decode(errors="replace")


def _open(name: str, units: list[Unit]) -> ctypes.CDLL:
    """Loads the library that these units make, compiling what the cache does not have."""
    cc = compiler()
    keys = [unit.key(cc) for unit in units]
    folder = cache_folder()
    target = folder / f"runtime-{name}-{hashlib.sha256(''.join(keys).encode()).hexdigest()[:20]}.so"
    if target.exists():
        try:
            return ctypes.CDLL(str(target))
        except OSError:  # cut off by a full disk, or from another system: made anew below
            pass
    objects = [folder / f"{unit.source}-{key}.o" for unit, key in zip(units, keys, strict=True)]
    _run([[cc, *FLAGS, *unit.flags, "-c", str(SOURCES / unit.source), "-o", OUT] for unit in units], objects)
    _run([[cc, "-shared", "-o", OUT, *map(str, objects), "-lm", "-lpthread"]], [target], again=True)
    return ctypes.CDLL(str(target))


OUT = "{out}"  # stands for the file that a command writes


def _run(commands: list[list[str]], targets: list[Path], again: bool = False) -> None:
    """Runs commands side by side, those whose file is not there yet. A file takes its name only when complete, so that
    two processes may do this at once."""
    jobs = []
    for command, target in zip(commands, targets, strict=True):
        if again or not target.exists():
            part = target.with_name(f"{target.name}.{os.getpid()}.part")
            words = [str(part) if word == OUT else word for word in command]
            jobs.append((words, part, target, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)))
    failed: tuple[list[str], str] | None = None
    for words, part, target, job in jobs:
        told = job.communicate()[1].decode(errors="replace")
        if job.returncode == 0:
            os.replace(part, target)
        else:
            part.unlink(missing_ok=True)
            failed = failed or (words, told)
    if failed is not None:
        lines = failed[1].strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise SmartpruneError(
            f"accelerate: the C compiler failed ({first}); the command was: {' '.join(failed[0])}; set CC to gcc 9 or clang 11 "
            'or newer, or pass backend="reference" for a slow run in torch'
        )


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: $SMARTPRUNE_CACHE, else ~/.cache/smartprune; a private temporary folder if that
    cannot be written, or if others could write it, for what lies there is run."""
    asked = os.environ.get("SMARTPRUNE_CACHE")
    try:
        folder = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smartprune"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = folder.stat()
        if held.st_uid == os.getuid() and not held.st_mode & (stat.S_IWOTH | stat.S_IWGRP) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    private = Path(tempfile.mkdtemp(prefix="smartprune-cache-"))
    # nobody else will look there but processes forked from this one, which waits for them before; atexit would not, and is not
    # heard in a process of multiprocessing's own
    Finalize(None, shutil.rmtree, (private, True), exitpriority=-100)
    return private
