"""Do the NPU cycles of smartprune agree with two public simulators, for dense layers and for rows of kept blocks?

python bench/npu_check.py --zigzag PYTHON --scalesim PYTHON [--out FILE.json]

Each PYTHON is the interpreter of an environment with the simulator: zigzag-dse 3.9.1 and six, or scalesim 3.0.0 and
numpy<2. The simulators do not accept a map of zero blocks, so a pruned layer is passed row by row: 16 output channels with n
kept blocks are a matrix product with 8 n inputs, and the cycles of the rows are added. ZigZag maps the products to an array of
16 outputs x 8 inputs with unlimited memory bandwidth (our output_stationary). SCALE-Sim simulates them cycle by cycle on a
weight-stationary systolic array. It prints the index of the last cycle, counted from 0. A few dense cases limit the weight
bandwidth in ZigZag, with room for one tile in use and one being loaded.
"""

import argparse
import csv
import json
import math
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A layer on an array. ``kept`` is the number of kept blocks per row of output blocks; empty: dense."""

    outputs: int
    inputs: int
    kernel: int
    side: int  # of the output, in pixels
    kept: tuple[int, ...] = ()
    rows: int = 16
    columns: int = 8
    bandwidth: int = 0  # bytes of weights per cycle; 0: unlimited

    @property
    def name(self) -> str:
        shape = f"{self.outputs}x{self.inputs}x{self.kernel}x{self.kernel}, {self.side**2} pixels"
        blocks = math.ceil(self.inputs / self.columns) * self.kernel**2
        kept = f", {' + '.join(map(str, self.kept))} of {blocks} blocks a row" if self.kept else ", dense"
        slow = f", {self.bandwidth} B/cycle" if self.bandwidth else ""
        return shape + kept + slow + (f", array {self.rows}x{self.columns}" if (self.rows, self.columns) != (16, 8) else "")

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """The matrix products for the simulators: (pixels, outputs, inputs)."""
        if not self.kept:
            return [(self.side**2, self.outputs, self.inputs * self.kernel**2)]
        return [(self.side**2, self.rows, self.columns * n) for n in self.kept]


CASES = [
    Case(64, 64, 3, 32),
    Case(128, 128, 3, 16),
    Case(512, 512, 1, 4),
    Case(20, 20, 1, 7),
    Case(1000, 512, 1, 1),
    Case(64, 64, 1, 14, rows=32, columns=32),
    *(Case(16, 64, 3, 32, (n,)) for n in (36, 7, 2, 1)),
    *(Case(16, 64, 3, 4, (n,)) for n in (36, 7, 1)),
    Case(64, 64, 3, 16, (36, 7, 2, 1)),
    *(Case(64, 64, 3, 8, bandwidth=n) for n in (8, 2, 1)),
    *(Case(64, 64, 3, 4, bandwidth=n) for n in (8, 4, 2, 1)),
    Case(16, 64, 3, 8, (36,), bandwidth=4),
    Case(16, 64, 3, 4, (7,), bandwidth=2),
    Case(64, 64, 1, 14, rows=32, columns=32, bandwidth=4),
]


def smartprune_cycles(case: Case, dataflow: str) -> int:
    """Cycles that smartprune estimates for a convolution with zero blocks."""
    import torch
    from torch import nn

    from smartprune import NPU
    from smartprune.core.block import Block

    layer = nn.Conv2d(case.inputs, case.outputs, case.kernel, padding=case.kernel // 2)
    block = Block(case.rows, case.columns)
    grid = block.grid(layer.weight.shape)
    if case.kept:
        mask = torch.zeros(grid.shape).reshape(len(case.kept), -1)
        for row, n in enumerate(case.kept):
            mask[row, torch.randperm(mask.shape[1], generator=torch.Generator().manual_seed(row))[:n]] = 1
        with torch.no_grad():
            layer.weight.mul_(grid.expand(mask.reshape(-1)))
    slow = case.bandwidth or math.inf
    npu = NPU(case.rows, case.columns, 1, dataflow, weight_bandwidth=slow, activation_bandwidth=math.inf, index_bytes=0)  # type: ignore[arg-type]
    return npu.estimate(layer, torch.zeros(1, case.inputs, case.side, case.side), block).latency


def zigzag(case: Case) -> list[int]:
    """Cycles of every product in ZigZag. Runs in its environment."""
    import logging

    import yaml
    from zigzag.api import get_hardware_performance_zigzag

    logging.disable(logging.CRITICAL)
    wide = 1 << 20

    def port(name: str, kind: str, *uses: str, width: int = wide) -> dict[str, Any]:
        return {"name": name, "type": kind, "bandwidth_min": 8, "bandwidth_max": width, "allocation": list(uses)}

    plain = {"r_cost": 1.0, "w_cost": 1.0, "area": 0, "latency": 1}
    sums = [port("r_port_1", "read", "O, tl"), port("r_port_2", "read", "O, th")]
    sums += [port("w_port_1", "write", "O, fh"), port("w_port_2", "write", "O, fl")]
    store = [port("r_port_1", "read", "I1, tl"), port("r_port_2", "read", "I2, tl", width=8 * case.bandwidth or wide)]
    store += [port("r_port_3", "read", "O, tl"), port("w_port_1", "write", "O, fl")]
    tile = [port("r_port_1", "read", "I2, tl"), port("w_port_1", "write", "I2, fh")]  # holds the current tile and the next one
    array = {"input_precision": [8, 8], "unit_energy": 1.0, "unit_area": 1, "dimensions": ["D1", "D2"]}
    machine = {
        "name": "array",
        "memories": {
            "sums": {**plain, "size": 32, "operands": ["O"], "ports": sums, "served_dimensions": ["D2"]},
            **(
                {"tile": {**plain, "size": 16, "operands": ["I2"], "ports": tile, "served_dimensions": []}}
                if case.bandwidth
                else {}
            ),
            "store": {**plain, "size": 1 << 40, "operands": ["I1", "I2", "O"], "ports": store, "served_dimensions": ["D1", "D2"]},
        },
        "operational_array": {**array, "sizes": [case.rows, case.columns]},
    }
    out = []
    for pixels, outputs, inputs in case.products:
        product = {
            "id": 0,
            "name": "product",
            "operator_type": "Gemm",
            "equation": "O[b][k]+=I[b][c]*W[c][k]",
            "loop_dims": ["B", "C", "K"],
            "loop_sizes": [pixels, inputs, outputs],
            "operand_precision": {"W": 8, "I": 8, "O": 32, "O_final": 8},
            "operand_source": {"I": 0, "W": 0},
        }
        spatial = {"D1": [f"K, {min(case.rows, outputs)}"], "D2": [f"C, {min(case.columns, inputs)}"]}
        mapping = {"name": "default", "spatial_mapping": spatial, "memory_operand_links": {"O": "O", "W": "I2", "I": "I1"}}
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for name, content in (("workload", [product]), ("machine", machine), ("mapping", [mapping])):
                paths.append(f"{folder}/{name}.yaml")
                Path(paths[-1]).write_text(yaml.safe_dump(content, sort_keys=False))
            result = get_hardware_performance_zigzag(
                *paths, opt="latency", dump_folder=f"{folder}/out", loma_show_progress_bar=False
            )
        out.append(int(result[1]))
    return out


SCALESIM = """[general]
run_name = run
[architecture_presets]
ArrayHeight: {columns}
ArrayWidth: {rows}
IfmapSramSzkB: 8192
FilterSramSzkB: 8192
OfmapSramSzkB: 8192
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Dataflow: ws
Bandwidth: 10
ReadRequestBuffer: 64
WriteRequestBuffer: 64
[layout]
IfmapCustomLayout: False
FilterCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: false
SparseRep: ellpack_block
OptimizedMapping: false
BlockSize: 8
RandomNumberGeneratorSeed: 40
[run_presets]
InterfaceBandwidth: CALC
UseRamulatorTrace: False
"""


def scalesim(case: Case) -> list[int]:
    """Last cycle of every product in SCALE-Sim. Runs in its environment."""
    from scalesim.scale_sim import scalesim as simulator

    with tempfile.TemporaryDirectory() as folder:
        Path(f"{folder}/machine.cfg").write_text(SCALESIM.format(rows=case.rows, columns=case.columns))
        lines = [f"p{i}, {m}, {n}, {k},\n" for i, (m, n, k) in enumerate(case.products)]
        Path(f"{folder}/products.csv").write_text("Layer, M, N, K,\n" + "".join(lines))
        ones = [f"p{i}," + "1," * 20 + "\n" for i in range(len(case.products))]
        Path(f"{folder}/layout.csv").write_text("Layer," + "x," * 20 + "\n" + "".join(ones))
        run = simulator(
            save_disk_space=True,
            verbose=False,
            config=f"{folder}/machine.cfg",
            topology=f"{folder}/products.csv",
            layout=f"{folder}/layout.csv",
            input_type_gemm=True,
        )
        run.run_scale(top_path=f"{folder}/out")
        with open(f"{folder}/out/run/COMPUTE_REPORT.csv", newline="") as file:
            return [int({key.strip(): value for key, value in row.items() if key}["Total Cycles"]) for row in csv.DictReader(file)]


TOOLS = {"zigzag": (zigzag, "zigzag-dse", "output_stationary"), "scalesim": (scalesim, "scalesim", "weight_stationary")}


def cases(tool: str) -> list[Case]:
    return [case for case in CASES if not case.bandwidth or tool == "zigzag"]


def run_simulator(tool: str) -> None:
    """Prints the cycles of all cases as JSON on the last line of stdout."""
    call, package, _ = TOOLS[tool]
    answers = []
    for case in cases(tool):
        answers.append(call(case))
        print(f"{tool}: {case.name}: {answers[-1]}", file=sys.stderr)
    print("\n" + json.dumps({"version": metadata.version(package), "answers": answers}))


def row(case: Case, protocol: str, value: int, **more: Any) -> dict[str, Any]:
    common = {"model": "-", "data": "-", "method": case.name, "block": "-", "sparsity": "-", "protocol": protocol}
    return {**common, "metric": "cycles", "values": [value], "mean": value, "std": None, "n": 1, "case": asdict(case), **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zigzag", metavar="PYTHON", help="interpreter of an environment with zigzag-dse")
    parser.add_argument("--scalesim", metavar="PYTHON", help="interpreter of an environment with scalesim")
    parser.add_argument("--drive", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if args.drive:
        run_simulator(args.drive)
        return
    rows, worst, versions = [], {True: 0.0, False: 0.0}, {"python": platform.python_version()}
    for tool, (_, package, dataflow) in TOOLS.items():
        if getattr(args, tool) is None:
            continue
        done = subprocess.run([getattr(args, tool), __file__, "--drive", tool], stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        versions[package] = result["version"]
        for case, answers in zip(cases(tool), result["answers"], strict=True):
            theirs, ours = sum(answers), smartprune_cycles(case, dataflow)
            expected = theirs + (len(answers) if tool == "scalesim" else 0)
            slow = case.bandwidth > 0
            worst[slow] = max(worst[slow], abs(ours / expected - 1))
            print(f"{package:<11} {case.name:<58} {theirs:>12,} {ours:>12,} {100 * (ours / expected - 1):>+8.4f}%")
            rows.append(row(case, f"{package} {result['version']}", theirs, products=case.products, answers=answers))
            rows.append(row(case, f"smartprune, {dataflow.replace('_', ' ')}", ours))
    print(f"largest difference {100 * worst[False]:.4f}%, {100 * worst[True]:.4f}% with limited weight bandwidth")
    if args.out:
        record: dict[str, Any] = {
            "rows": rows,
            "largest relative difference": worst[False],
            "where weights are waited for": worst[True],
            "versions": versions,
            "device": platform.machine(),
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
