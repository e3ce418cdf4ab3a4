"""How large is a network as C, and how fast is it? Sizes for x86 and ARM, and the time of one call on this machine, one thread.

python bench/c_export.py [--out records/c-export] [--dtype float16] [--rounds 5] [--repeats 20]

ResNet18 and MobileNetV2 for images of 32 pixels, with 90 % of 16x8 blocks zero at random. The time of the exported function is
compared with that of the accelerated model, which has the same kernels, and with torch. `--rounds 0` measures sizes only. Needs
gcc, and aarch64-linux-gnu-gcc for the sizes on ARM.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.models import MODELS
from smartprune.runtime.c_source.check import FLAGS, compile_and_load
from smartprune.runtime.cpu import build
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS

BLOCK, SHARE, SIDE = (16, 8), 0.9, 32
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc", None: "gcc"}
TARGETS = {
    "float32": ("portable", "avx2", "avx512vnni", "neon"),
    "float16": ("portable", "neon_fp16"),
    "int8": ("portable", "avx512vnni", "neon", "neon_dot", "neon_i8mm"),
}
NOTE = (
    "Code, weights with tables, and activations are bytes in the object file of gcc 12 with the flags that the file names; "
    "source is the size of the C file. Masks are random, so accuracy means nothing here. Times, if any, are processor time of "
    "one thread on an x86 machine that about ten other programs used, the least of the calls of a round: differences below 20 % "
    "are noise. Times on ARM were not measured."
)


def pruned(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and module.weight.shape[1] >= BLOCK[1]:
            grid = sp.Block(*BLOCK).grid(tuple(module.weight.shape))
            module.weight.data *= grid.expand((torch.rand(grid.n, generator=generator) >= SHARE).float())
    return model


def sizes(path: Path, exported: Any, folder: Path) -> dict[str, float]:
    """Bytes of the parts of an exported network."""
    isa = next(row for row in INSTRUCTION_SETS if row.name == exported.target)
    target = folder / "net.o"
    subprocess.run([COMPILERS[isa.architecture], *FLAGS, *isa.flags, "-c", str(path), "-o", str(target)], check=True)
    listed = subprocess.run(
        [COMPILERS[isa.architecture].replace("gcc", "size"), "-A", str(target)], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    sections = {line.split()[0]: int(line.split()[1]) for line in listed if line.startswith(".")}
    return {
        "code, bytes": sum(size for name, size in sections.items() if name.startswith(".text")),
        "weights and tables, bytes": exported.constants,
        "activations, bytes": exported.memory,
        "source, bytes": exported.size,
    }


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def row(name: str, method: str, metric: str, values: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    common = {"model": name, "data": f"1x3x{SIDE}x{SIDE}", "method": method, "block": "16x8", "sparsity": SHARE}
    numbers = {"values": values, "mean": statistics.mean(values), "std": spread, "n": len(values)}
    return {**common, "protocol": "random masks", "unit": metric.rpartition(", ")[2], "metric": metric, **numbers}


def measure(name: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, x = pruned(name), torch.randn(1, 3, SIDE, SIDE)
    settings: dict[str, Any] = {"float32": {}, "float16": {"fp16": True}, "int8": {"int8": True, "calibration": [x]}}[dtype]
    out = []
    calls: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        folder = Path(temporary)
        for target in TARGETS[dtype]:
            exported = sp.export_c(model, folder / "net.c", x, target=target, **settings)
            for metric, size in sizes(folder / "net.c", exported, folder).items():
                out.append(row(name, f"C, {target}, {dtype}", metric, [float(size)]))
            supported = build.supported_sets()
            if target in supported:
                shape = tuple(model(x).shape)
                source, header = ((folder / f"net{suffix}").read_text() for suffix in (".c", ".h"))
                calls[f"C, {target}, {dtype}"] = call_of(compile_and_load(source, header, "net", supported[target], [shape]), x)
        if not args.rounds:
            return out
        fast = sp.accelerate(model, example=x, dtype=dtype, threads=1, backend="native" if dtype == "float32" else "auto")
        calls[f"accelerate, {dtype}"] = call_of(fast, x)
        if dtype == "float32":
            calls["torch, float32"] = call_of(model, x)
        rounds = [{label: milliseconds(call, args.repeats) for label, call in calls.items()} for _ in range(args.rounds)]
    return out + [row(name, label, "time, ms", [times[label] for times in rounds]) for label in calls]


def call_of(function: Callable[[Any], object], x: Tensor) -> Callable[[], object]:
    takes_list = not isinstance(function, nn.Module)
    return lambda: function([x] if takes_list else x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--model", action="append", choices=("resnet18", "mobilenetv2"))
    parser.add_argument("--dtype", action="append", choices=tuple(TARGETS))
    parser.add_argument("--rounds", type=int, default=5, help="0: no times")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models, dtypes = args.model or ("resnet18", "mobilenetv2"), args.dtype or tuple(TARGETS)
    found = [row for name in models for dtype in dtypes for row in measure(name, dtype, args)]
    for entry in found:
        print(f"{entry['model']:12s} {entry['method']:26s} {entry['metric']:26s} {entry['mean']:>14,.3f}")
    if args.out is not None:
        machine = f"{platform.machine()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        options = {"rounds": args.rounds, "repeats": args.repeats, "block": BLOCK, "sparsity": SHARE, "flags": FLAGS}
        save_record(
            args.out, {"rows": found}, options, NOTE, [shlex.join(["python", "bench/c_export.py", *sys.argv[1:]])], [machine]
        )


if __name__ == "__main__":
    main()
