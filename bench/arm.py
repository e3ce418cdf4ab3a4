"""How many instructions do the ARM kernels execute per multiply-accumulate? Counted in the compiler's output, without a processor.

python bench/arm.py [--mca llvm-mca-19] [--out records/arm-kernels]

For every instruction set and type, conv.c is compiled with one tile, of eight pixels or, in float16, sixteen. In its assembly, the
loop with most multiply instructions is the one over the kept entries. The rows of XNNPACK are counted from the comments in its
sources: "48 FMA + 6 ld128 A + 4 LDP B", and "48 FMA + 6 ld32 A + 8 LDR B" in float16, and a subtraction and a branch. With --mca,
llvm-mca computes the cycles of every loop on two cores, with all data in the first-level cache; XNNPACK's loops are then ones with
the same instructions in the same order. Needs aarch64-linux-gnu-gcc.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

from smartprune.experiments.compare.record import save_record
from smartprune.runtime.cpu.build import FLAGS, SOURCES
from smartprune.runtime.cpu.instruction_sets import HALF_SUM, INSTRUCTION_SETS, InstructionSet

COMPILER = "aarch64-linux-gnu-gcc"
PIXELS = {"float32": 8, "float16": 16, "int8": 8}
MULTIPLY = {"fmla": 4, "smlal": 4, "smlal2": 4, "sdot": 16, "smmla": 32}  # multiply-accumulates of one instruction
XNNPACK = {"instructions": 60, "multiplies": 48, "loads": 10, "macs": 192}
XNNPACK_HALF = {"instructions": 64, "multiplies": 48, "loads": 14, "macs": 384}
XNNPACK_SOURCE = "src/f32-gemm/6x8-aarch64-neonfma-ld128.S.in of google/XNNPACK at 0954c35c"
XNNPACK_HALF_SOURCE = "src/f16-gemm/6x16-aarch64-neonfp16arith-cortex-a75.S.in at 592e4054"
CORES = {"Neoverse-N1": "neoverse-n1", "Neoverse-N2": "neoverse-n2"}  # with a model of their own in LLVM 19
LACKS = {("Neoverse-N1", "neon_i8mm"), ("Neoverse-N2", "XNNPACK 6x16, float16")}
ITERATIONS = 200
NOTE = (
    "Instructions of the innermost loop per multiply-accumulate, counted in assembly: no time was measured, because there is no "
    "such processor here, and a loop with fewer instructions need not be faster. Loads of two registers count as one "
    f"instruction. XNNPACK's rows are its dense kernels ({XNNPACK_SOURCE}; {XNNPACK_HALF_SOURCE}), counted by hand. Cycles are "
    "those that llvm-mca predicts from LLVM's model of a core, for data in the first-level cache. LLVM 19 and 22 have no model "
    "of Cortex-A76: they use that of Cortex-A57 there, so Cortex-A76 is left out; Neoverse-N1 is its sibling for servers. "
    "Neoverse-N2 stands for cores with smmla. Tiles have 8 pixels, or 16 in float16, and those of XNNPACK 6. The float16 loop "
    f"is without what follows after every {HALF_SUM} products of a pixel: two conversions and additions, and loads and stores of "
    "the float32 sums. XNNPACK has float16 sums only. Its float16 loop is left out on Neoverse-N2: if a load changes its "
    "address, LLVM 19 waits for the address as long as for the data there, which LLVM 22 does not, and the loop has eight such "
    "loads in a row."
)


def assembly(isa: InstructionSet, dtype: str) -> str:
    arithmetic = [f"-DQUANT={int(dtype == 'int8')}", f"-DHALF={int(dtype == 'float16')}"]
    command = [COMPILER, *FLAGS, *isa.flags, *isa.definitions, "-DWIDTH=8", *arithmetic, f"-DTILES(F)=F(1, {PIXELS[dtype]}, 1)"]
    return subprocess.run([*command, "-S", "-o", "-", str(SOURCES / "conv.c")], capture_output=True, text=True, check=True).stdout


def innermost(text: str, pixels: int) -> list[str]:
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
            if multiplies >= 2 * pixels and multiplies / len(body) > share:
                best, share = body, multiplies / len(body)
    return best


def macs_of(lines: list[str]) -> int:
    """The multiply-accumulates of a loop. An instruction has twice as many of float16 numbers."""
    names = [(line.split("\t")[0], ".8h" in line.split(",")[0]) for line in lines]
    return sum(MULTIPLY.get(name, 0) * (1 + (half and name == "fmla")) for name, half in names)


def count(lines: list[str], names: Any) -> int:
    return sum(line.split("\t")[0] in names for line in lines)


def loops(tool: str | None) -> dict[str, dict[str, float]]:
    """The counts of every loop, and its cycles if there is a tool."""
    counts: dict[str, dict[str, float]] = {}
    for isa in INSTRUCTION_SETS:
        for dtype in dtypes_of(isa):
            lines = innermost(assembly(isa, dtype), PIXELS[dtype])
            macs = macs_of(lines)
            assert macs % (PIXELS[dtype] * 8) == 0
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
            counts[f"{isa.name}, {dtype}"] = numbers
    for name, numbers, lines in (
        ("XNNPACK 6x8, float32", XNNPACK, xnnpack_loop()),
        ("XNNPACK 6x16, float16", XNNPACK_HALF, xnnpack_half_loop()),
    ):
        counts[name] = {**numbers, **{core: cycles(tool, core, lines) for core in CORES if tool and (core, name) not in LACKS}}
    return counts


def dtypes_of(isa: InstructionSet) -> tuple[str, ...]:
    """The types for which an instruction set for ARM has loops of its own."""
    if isa.architecture != "aarch64":
        return ()
    return ("float16",) if isa.half_pixels else ("float32", "int8") if isa.name == "neon" else ("int8",)


def xnnpack_loop() -> list[str]:
    """The multiplications and loads of XNNPACK's loop: four numbers of 6 rows of A times four rows of 8 numbers of B."""
    lines = [f"ldr q{row}, [x{row}], 16" for row in range(6)]
    for channel in range(4):
        low, high = 12 + channel % 2 * 2, 13 + channel % 2 * 2
        lines.append(f"ldp q{low}, q{high}, [x9], 32")
        lines += [f"fmla v{20 + row}.4s, v{low}.4s, v{row}.s[{channel}]" for row in range(6)]
        lines += [f"fmla v{26 + row}.4s, v{high}.4s, v{row}.s[{channel}]" for row in range(6)]
    return [*lines, "subs x10, x10, 16", "b.hs loop"]


def xnnpack_half_loop() -> list[str]:
    """The same of its float16 loop: four numbers of 6 rows of A times four rows of 16 numbers of B."""
    after = {  # what is loaded after how many pairs of multiplications
        0: {0: "d4, [x12]", 1: "d5, [x4]", 2: "q18, [x5]", 3: "q19, [x5]"},
        1: {0: "q16, [x5]", 1: "q17, [x5]"},
        2: {0: "q18, [x5]", 1: "q19, [x5]"},
        3: {-1: "q16, [x5]", 0: "q17, [x5]", 1: "d0, [x3]", 2: "d1, [x9]", 3: "d2, [x10]", 4: "d3, [x11]"},
    }
    lines = []
    for channel, loads in after.items():
        low = 16 + channel % 2 * 2
        for row in range(-1, 6):
            if row >= 0:
                lines += [f"fmla v{20 + 2 * row + i}.8h, v{low + i}.8h, v{row}.h[{channel}]" for i in (0, 1)]
            if row in loads:
                lines.append(f"ldr {loads[row]}, {8 if loads[row].startswith('d') else 16}")
        if channel == 0:
            lines.append("subs x0, x0, 8")
    return [*lines, "b.hs loop"]


def cycles(tool: str, core: str, lines: list[str]) -> float:
    """The cycles of one pass through a loop."""
    command = [
        tool,
        "-mtriple=aarch64-linux-gnu",
        f"-mcpu={CORES[core]}",
        "-mattr=+dotprod,+i8mm,+fullfp16",
        f"--iterations={ITERATIONS}",
    ]
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
                "protocol": "largest tile",
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
        settings = {"flags": list(FLAGS), "pixels": PIXELS, "xnnpack": [XNNPACK_SOURCE, XNNPACK_HALF_SOURCE], "counts": counts}
        save_record(args.out, {"rows": found}, settings, NOTE, [command], [version])


if __name__ == "__main__":
    main()
