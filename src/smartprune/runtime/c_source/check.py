"""Compiles an exported network on this machine and runs it, to compare its outputs with the model."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...errors import SmartpruneError
from ..cpu import build
from ..cpu.instruction_sets import InstructionSet

FLAGS = (
    "-O2",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)  # those that the first comment of the file names

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@contextmanager
def for_export() -> Iterator[None]:
    """Errors of the compiler name the export, and do not propose what only the runtime has."""
    try:
        yield
    except SmartpruneError as error:
        message = str(error).removeprefix("accelerate: ").removesuffix(f", or {build.REFERENCE}")
        raise SmartpruneError(f"export_c: {message}; no file was written") from error


def compile_and_load(source: str, header: str, name: str, isa: InstructionSet, outputs: Sequence[Sequence[int]]) -> Run:
    """The function of an exported network, for float32 tensors. ``outputs`` are the shapes of its results."""
    windows = sys.platform == build.WINDOWS
    if windows:
        header = header.replace(f"int {name}_run(", f"__declspec(dllexport) int {name}_run(")
    with tempfile.TemporaryDirectory(prefix="smartprune-c-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / f"{name}.c").write_text(source)
        (folder / f"{name}.h").write_text(header)
        library = folder / f"{name}.so"
        shared = ("-shared",) if windows else ("-fPIC", "-shared")
        with for_export():
            compiler = build.compiler()
        command = [*compiler, *FLAGS, *isa.flags, *shared, "-o", str(library), str(folder / f"{name}.c")]
        command += build.libraries_of(sys.platform)
        with for_export():
            build.run_commands(folder, [command])
        code = ctypes.CDLL(str(library))  # the file may be removed while it is loaded, except on Windows
    function = getattr(code, f"{name}_run")
    function.restype = ctypes.c_int

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = [x.contiguous() for x in inputs]
        results = [torch.empty(tuple(shape)) for shape in outputs]
        status = function(*(ctypes.c_void_p(x.data_ptr()) for x in (*given, *results)))
        assert status == 0
        return results

    return run
