"""Networks as C: written for an instruction set, compiled with any compiler, and run as programs of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smartprune.artifacts.onnx_inputs import read_example
from smartprune.runtime.c_source.check import FLAGS
from smartprune.runtime.c_source.graph import Graph
from smartprune.runtime.c_source.network import Network
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS

SETS = {row.name: row for row in INSTRUCTION_SETS}
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ON_ARM = (QEMU, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")

MAIN = """#include <stdio.h>
#include "net.h"
%s
int main(void) {
%s  return 0;
}
"""

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_arm = pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(QEMU) is None,
    reason=f"{CROSS} or {QEMU} is not installed (Debian: gcc-aarch64-linux-gnu, qemu-user)",
)


class Written:
    """A model as C in a folder, for one instruction set."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[Tensor], folder: Path, target: str, int8: bool = False, fp16: bool = False
    ) -> None:
        with torch.no_grad():
            arguments, batch = read_example(model, tuple(inputs))
            graph = Graph(model, arguments, batch)
            if int8 or fp16:
                graph.measure([batch])
            self.expected = torch.utils._pytree.tree_leaves(model(*inputs))
        self.inputs, self.folder, self.isa = inputs, folder, SETS[target]
        self.network: Network = graph.network(self.isa, "int8" if int8 else "float16" if fp16 else "float32")
        folder.mkdir(exist_ok=True)
        self.source = f'#include "net.h"\n\n{self.network.source("net")}'
        (folder / "net.c").write_text(self.source)
        (folder / "net.h").write_text(self.network.header("net", ""))

    def run(self, compiler: str = "gcc", flags: Sequence[str] = FLAGS, emulator: Sequence[str] = ()) -> list[Tensor]:
        """Compiles the network with a main function, and returns its outputs."""
        (self.folder / "main.c").write_text(self._main())
        program = self.folder / "net"
        files = [str(self.folder / name) for name in ("net.c", "main.c")]
        done = subprocess.run(
            [compiler, *flags, *self.isa.flags, *files, "-o", str(program), "-lm"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        given = b"".join(x.contiguous().numpy().tobytes() for x in self.inputs)
        environment = {"ASAN_OPTIONS": "detect_leaks=0", "PATH": "/usr/bin:/bin"}  # qemu cannot look for leaks
        ran = subprocess.run([*emulator, str(program)], input=given, capture_output=True, check=False, env=environment)
        assert ran.returncode == 0, ran.stderr.decode(errors="replace")[-3000:]
        numbers = torch.from_numpy(np.frombuffer(ran.stdout, np.float32).copy())
        parts = numbers.split([x.numel() for x in self.expected])
        return [part.reshape(x.shape) for part, x in zip(parts, self.expected, strict=True)]

    def _main(self) -> str:
        """A program that reads the inputs, calls the network twice, and writes the outputs."""
        names = {"input": len(self.network.inputs), "output": len(self.network.outputs)}
        labels = [f"{kind}{'' if count == 1 else i}" for kind, count in names.items() for i in range(count)]
        given = labels[: names["input"]]
        arrays = "".join(f"static float {label}[NET_{label.upper()}_SIZE];\n" for label in labels)
        sizes = [(label, f"NET_{label.upper()}_SIZE") for label in labels]
        lines = [f"  if (fread({label}, 4, {size}, stdin) != {size}) return 1;\n" for label, size in sizes if label in given]
        call = f"net_run({', '.join(labels)})"
        lines.append(f"  if ({call} || {call}) return 2;\n")
        lines += [f"  fwrite({label}, 4, {size}, stdout);\n" for label, size in sizes if label not in given]
        return MAIN % (arrays, "".join(lines))


def relative_errors(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """The root mean square errors of all outputs."""
    return [float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in zip(actual, expected, strict=True)]
