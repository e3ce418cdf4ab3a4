"""How many instructions do the ARM kernels execute per multiply-accumulate? Counted in the compiler's output, without a processor.

python bench/arm.py [--mca llvm-mca-19] [--out records/arm-kernels]

For every instruction set and type, conv.c is compiled with one tile of eight pixels. In its assembly, the loop with most multiply
instructions is the one over the kept entries. The row of XNNPACK is counted from the comment in its source: "48 FMA + 6 ld128 A +
4 LDP B", and a subtraction and a branch. With --mca, llvm-mca computes the cycles of every loop on two cores, with all data in the
first-level cache; XNNPACK's loop is then one with the same instructions in the same order. Needs aarch64-linux-gnu-gcc.
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
CORES = {"Neoverse-N1": "neoverse-n1", "Neoverse-N2": "neoverse-n2"}  # with a model of their own in LLVM 19
LACKS = {("Neoverse-N1", "neon_i8mm")}
ITERATIONS = 200
NOTE = (
    "Instructions of the innermost loop per multiply-accumulate, counted in assembly: no time was measured, because there is no "
    "such processor here, and a loop with fewer instructions need not be faster. Loads of two registers count as one instruction. "
    f"XNNPACK's row is its dense 6x8 kernel ({XNNPACK_SOURCE}), counted by hand. Cycles are those that llvm-mca predicts from "
    "LLVM's model of a core, for data in the first-level cache. LLVM 19 has no model of Cortex-A76: it uses that of Cortex-A57 "
    "there, so Cortex-A76 is left out; Neoverse-N1 is its sibling for servers. Neoverse-N2 stands for cores with smmla."
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


def loops(tool: str | None) -> dict[str, dict[str, float]]:
    """The counts of every loop, and its cycles if there is a tool."""
    counts: dict[str, dict[str, float]] = {}
    for isa in INSTRUCTION_SETS:
        for quantized in (False, True) if isa.architecture == "aarch64" else ():
            if not quantized and isa.name != "neon":
                continue  # float32 kernels are the same for all of them
            lines = innermost(assembly(isa, quantized))
            macs = sum(MULTIPLY.get(line.split("\t")[0], 0) for line in lines)
            assert macs % (PIXELS * 8) == 0
            loads = sum(bool(re.match(r"ld\w*\t", line)) for line in lines)
            spills = sum("[sp" in line for line in lines)
            numbers: dict[str, float] = {
                "instructions": len(lines),
                "multiplies": count(lines, MULTIPLY),
                "loads": loads,
                "spills": spills,
                "macs": macs,
            }
            for core in CORES if tool else ():
                if (core, isa.name) not in LACKS:
                    numbers[core] = cycles(str(tool), core, lines)
            counts[f"{isa.name}, {'int8' if quantized else 'float32'}"] = numbers
    theirs = {core: cycles(tool, core, xnnpack_loop()) for core in CORES} if tool else {}
    return {**counts, "XNNPACK 6x8, float32": {**XNNPACK, **theirs}}


def xnnpack_loop() -> list[str]:
    """The multiplications and loads of XNNPACK's loop: four numbers of 6 rows of A times four rows of 8 numbers of B."""
    lines = [f"ldr q{row}, [x{row}], 16" for row in range(6)]
    for channel in range(4):
        low, high = 12 + channel % 2 * 2, 13 + channel % 2 * 2
        lines.append(f"ldp q{low}, q{high}, [x9], 32")
        lines += [f"fmla v{20 + row}.4s, v{low}.4s, v{row}.s[{channel}]" for row in range(6)]
        lines += [f"fmla v{26 + row}.4s, v{high}.4s, v{row}.s[{channel}]" for row in range(6)]
    return [*lines, "subs x10, x10, 16", "b.hs loop"]


def cycles(tool: str, core: str, lines: list[str]) -> float:
    """The cycles of one pass through a loop."""
    command = [tool, "-mtriple=aarch64-linux-gnu", f"-mcpu={CORES[core]}", "-mattr=+dotprod,+i8mm", f"--iterations={ITERATIONS}"]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    match = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert match
    return int(match[1]) / ITERATIONS


def rows(counts: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    out = []
    for name, numbers in counts.items():
        for metric, value in (
            ("instructions / MAC", numbers["instructions"] / numbers["macs"]),
            ("instructions / multiply instruction", numbers["instructions"] / numbers["multiplies"]),
            ("loads / multiply instruction", numbers["loads"] / numbers["multiplies"]),
            *((f"MACs / cycle, {core}", numbers["macs"] / numbers[core]) for core in CORES if core in numbers),
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
    parser.add_argument("--mca", metavar="COMMAND", help="llvm-mca of LLVM 19 or newer")
    args = parser.parse_args()
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    counts = loops(args.mca)
    found = rows(counts)
    if args.out is not None:
        command = f"python bench/arm.py --mca llvm-mca-19 --out {args.out}"
        if args.mca:
            tool = subprocess.run([args.mca, "--version"], capture_output=True, text=True, check=True).stdout
            version += ", " + next(line.strip() for line in tool.splitlines() if "LLVM version" in line)
        settings = {"flags": list(FLAGS), "tile": TILE, "xnnpack": XNNPACK_SOURCE, "counts": counts}
        save_record(args.out, {"rows": found}, settings, NOTE, [command], [version])


if __name__ == "__main__":
    main()
