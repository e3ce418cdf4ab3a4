"""How many instructions do the ARM kernels execute per multiply-accumulate? Counted in the compiler's output, without a processor.

python bench/arm.py [--out records/arm-kernels]

For every instruction set and type, conv.c is compiled with one tile of eight pixels. In its assembly, the loop with most multiply
instructions is the one over the kept entries. The row of XNNPACK is counted from the comment in its source: "48 FMA + 6 ld128 A +
4 LDP B", and a subtraction and a branch. Needs aarch64-linux-gnu-gcc.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

from smartprune.experiments.compare.record import save_record
from smartprune.runtime.cpu.build import FLAGS, SOURCES
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet

COMPILER = "aarch64-linux-gnu-gcc"
TILE = "F(1, 8, 1)"
PIXELS = 8
MULTIPLY = {"fmla": 4, "smlal": 4, "smlal2": 4, "sdot": 16, "smmla": 32}  # multiply-accumulates of one instruction
XNNPACK = {"instructions": 60, "multiplies": 48, "loads": 10, "macs": 192}
XNNPACK_SOURCE = "src/f32-gemm/6x8-aarch64-neonfma-ld128.S.in of google/XNNPACK at 0954c35c"
NOTE = (
    "Instructions of the innermost loop per multiply-accumulate, counted in assembly: no time was measured, because there is no "
    "such processor here, and a loop with fewer instructions need not be faster. Loads of two registers count as one instruction. "
    f"XNNPACK's row is its dense 6x8 kernel ({XNNPACK_SOURCE}), counted by hand. "
    "llvm-mca 14 has no model of Cortex-A76 and Neoverse-N1 of its own: it uses that of Cortex-A57, so its cycles are not given."
)


def assembly(isa: InstructionSet, quantized: bool) -> str:
    command = [COMPILER, *FLAGS, *isa.flags, *isa.definitions, "-DWIDTH=8", f"-DQUANT={int(quantized)}", f"-DTILES(F)={TILE}"]
    return subprocess.run([*command, "-S", "-o", "-", str(SOURCES / "conv.c")], capture_output=True, text=True, check=True).stdout


def innermost(text: str) -> list[str]:
    """The instructions of the loop with the largest share of multiplications: from a label to a branch back to it."""
    lines = re.findall(r"^(\.L\w+:|\t[a-z][\w.]*\t?.*)$", text, re.M)
    labels: dict[str, int] = {}
    best: list[str] = []
    share = 0.0
    for place, line in enumerate(lines):
        if line.endswith(":"):
            labels[line[:-1]] = place
            continue
        words = line.split()
        if re.match(r"b\.?\w*$|cbn?z$|tbn?z$", words[0]) and words[-1] in labels:
            body = [other.strip() for other in lines[labels[words[-1]] : place + 1] if not other.endswith(":")]
            multiplies = count(body, MULTIPLY)
            if multiplies >= 2 * PIXELS and multiplies / len(body) > share:
                best, share = body, multiplies / len(body)
    return best


def count(lines: list[str], names: Any) -> int:
    return sum(line.split("\t")[0] in names for line in lines)


def loops() -> dict[str, dict[str, int]]:
    """The counts of every loop."""
    counts = {}
    for isa in INSTRUCTION_SETS:
        for quantized in (False, True) if isa.architecture == "aarch64" else ():
            if not quantized and isa.name != "neon":
                continue  # float32 kernels are the same for all of them
            lines = innermost(assembly(isa, quantized))
            macs = sum(MULTIPLY.get(line.split("\t")[0], 0) for line in lines)
            assert macs % (PIXELS * 8) == 0
            loads = sum(bool(re.match(r"ld\w*\t", line)) for line in lines)
            spills = sum("[sp" in line for line in lines)
            numbers = {
                "instructions": len(lines),
                "multiplies": count(lines, MULTIPLY),
                "loads": loads,
                "spills": spills,
                "macs": macs,
            }
            counts[f"{isa.name}, {'int8' if quantized else 'float32'}"] = numbers
    return {**counts, "XNNPACK 6x8, float32": XNNPACK}


def rows(counts: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    out = []
    for name, numbers in counts.items():
        for metric, value in (
            ("instructions / MAC", numbers["instructions"] / numbers["macs"]),
            ("instructions / multiply instruction", numbers["instructions"] / numbers["multiplies"]),
            ("loads / multiply instruction", numbers["loads"] / numbers["multiplies"]),
        ):
            row = {"model": "innermost loop", "data": "none", "method": name, "block": "16x8", "sparsity": 0.0, "unit": "ratio"}
            row |= {
                "protocol": f"{PIXELS} pixels",
                "metric": metric,
                "values": [value],
                "mean": value,
                "std": None,
                "n": 1,
            }
            out.append(row)
            print(f"{name:24s} {metric:38s} {value:.3f}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the record")
    args = parser.parse_args()
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    counts = loops()
    found = rows(counts)
    if args.out is not None:
        command = f"python bench/arm.py --out {args.out}"
        settings = {"flags": list(FLAGS), "tile": TILE, "xnnpack": XNNPACK_SOURCE, "counts": counts}
        save_record(args.out, {"rows": found}, settings, NOTE, [command], [version])


if __name__ == "__main__":
    main()
