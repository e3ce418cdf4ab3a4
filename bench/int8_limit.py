"""How close does int8 come to a speed-up of one over the share of MACs left, and what limits it?

python bench/int8_limit.py [--before FOLDER] [--cases resnet18 ...] [--rounds 4] [--repeats 60] [--out records/int8-limit]

The cases are networks and chains of bench/runtime.py, with random masks that are alike in every layer, batch 1, one thread. The
efficiency is the speed-up over the dense network times the share of MACs left, so 1.0 is linear. The dense network is that of the
same runtime or, in rows that say so, that of onnxruntime in int8.

The limit is the efficiency of a runtime whose products take the dense network's time per MAC, next to a fixed time: for the call,
the input, the depthwise and unpruned layers, and what follows the sums of every output (scaling, addition, rounding, storing).
The fixed time is measured with masks that keep one block of every 16 output channels, from which that of its products is
subtracted. Real masks also remove all blocks of some output channels, whose results are only copied, so an efficiency may be above
the limit. For networks, shares say what the fixed time consists of.

Times are processor times, the least of the calls of a round. Checkouts and masks take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
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

import runtime as bench
import smartprune as sp
from smartprune.experiments.compare.record import save_record
from smartprune.runtime import module
from smartprune.runtime.cpu import abi

ROOT = Path(__file__).resolve().parents[1]
CASES = ("resnet18", "mobilenetv2", "1x1 256-1024 @14", "1x1 64-256 @56")
SHARES = (0.9, 0.95, 0.97)
DENSE, THIN, RIVAL = "dense", "one block per group", "onnxruntime, dense"
NOTE = (
    "Random masks, alike in every layer; learned masks leave other channels empty. Processor time of one thread, the least of the "
    "calls of a round; other programs used the machine. The efficiency is the speed-up over the dense network times the share of "
    "MACs left. The limit is that of a runtime whose products take the dense network's time per MAC, next to the fixed time of "
    "this one. 'before' is the checkout before results were stored from registers; its masks and MACs are the same. Random weights "
    "make int8 inaccurate, so the results are not checked here."
)


def masked(case: str, mask: float | str) -> nn.Module:
    """The case with a share of its blocks removed, or with one block for every 16 output channels of a prunable layer."""
    model = bench.build(case, mask if isinstance(mask, float) else 0.0, None, 0.0)
    if mask == THIN:
        for weight, grid in bench.prunable(model):
            kept = torch.zeros(grid.n).view(math.ceil(weight.shape[0] / bench.BLOCK[0]), -1)
            kept[:, 0] = 1
            weight.data *= grid.expand(kept.view(-1))
    return model


def onnxruntime_int8(model: nn.Module, x: Tensor, folder: Path) -> Callable[[], object]:
    import onnxruntime

    sp.export_onnx(model, folder / "m.onnx", x, block=bench.BLOCK, int8=True, calibration=[x])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "m.onnx", options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, inputs)


def fixed_parts(fast: Any, x: Tensor, total: float, repeats: int) -> dict[str, float]:
    """The milliseconds of the kinds of operations of a network with one block per group. The requantization is what remains of
    its convolutions; ``total`` is the time of a call."""
    out = dict.fromkeys(("depthwise", "first and last layer", "pruned layers", "other operations"), 0.0)
    (program,) = fast.plan(x).programs
    operations = program._compiled.operations
    with program.timer() as times:
        for _ in range(repeats):
            fast(x)
    empty = min(times)  # the export of ten numbers: about the time of a call without work
    convolutions = [i for i, operation in enumerate(operations) if operation.kind == abi.OPERATION["conv"]]
    for i, operation in enumerate(operations):
        kind = abi.OPERATIONS[operation.kind]
        ends = i in (convolutions[0], convolutions[-1]) and min(operation.x.channels, operation.y.channels) < 16
        name = (
            "first and last layer"
            if ends
            else "depthwise"
            if kind == "depthwise"
            else "pruned layers"
            if kind == "conv"
            else "other operations"
        )
        out[name] += (times[i] - empty) / 1e6
    return out | {"call": max(0.0, total - sum(out.values()))}


def worker(case: str, repeats: int, engines: bool) -> None:
    """Prints the milliseconds of all masks, the MACs left, and the parts of the fixed time as JSON."""
    torch.set_num_threads(1)
    module.TOLERANCE_INT8 = float("inf")  # its name in older checkouts
    getattr(module, "TOLERANCES", {})["int8"] = float("inf")
    x = torch.randn(1, *bench.shape(case), generator=torch.Generator().manual_seed(2))
    out: dict[str, Any] = {"ms": {}, "macs": {}, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, Callable[[], object]] = {}
        models = {str(mask): masked(case, mask) for mask in (DENSE, THIN, *SHARES)}
        fast = {name: sp.accelerate(model, example=[x], dtype="int8", threads=1) for name, model in models.items()}
        calls |= {name: lambda run=run: run(x) for name, run in fast.items()}  # type: ignore[misc]
        if engines:
            calls[RIVAL] = onnxruntime_int8(models[DENSE], x, Path(folder))
        for name, call in calls.items():
            times = []
            for _ in range(repeats):
                start = time.thread_time()
                call()
                times.append(time.thread_time() - start)
            out["ms"][name] = 1e3 * min(times)
        out["macs"] = {name: bench.kept_macs(model, x) for name, model in models.items()}
        if case in bench.SIDES:  # a network: its smallest operation, the export, shows what timing one operation costs
            out["parts"] = fixed_parts(fast[THIN], x, out["ms"][THIN], repeats)
    print(json.dumps(out))


def measure(source: Path, case: str, args: argparse.Namespace, engines: bool) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", case, "--repeats", str(args.repeats)]
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *["--engines"] * engines], env=environment, capture_output=True, text=True, check=True)
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def fixed_time(found: dict[str, Any]) -> float:
    """The milliseconds that no mask shortens."""
    kept = found["macs"][THIN]
    return float((found["ms"][THIN] - kept * found["ms"][DENSE]) / (1 - kept))


def numbers_of(found: dict[str, Any], share: str) -> dict[str, float]:
    ms, kept, fixed = found["ms"], found["macs"][share], fixed_time(found)
    out = {"ms": ms[share], "efficiency": kept * ms[DENSE] / ms[share]}
    out["limit"] = kept * ms[DENSE] / (fixed + kept * (ms[DENSE] - fixed))
    if RIVAL in ms:
        out["against onnxruntime"] = kept * ms[RIVAL] / ms[share]
    return out


def rows(case: str, after: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []

    def add(label: str, share: object, metric: str, values: list[float]) -> None:
        common = {"model": "networks and chains", "data": "random", "method": f"{case}, {label}" if label else case}
        common |= {"block": "16x8", "sparsity": share, "protocol": "batch 1", "metric": metric}
        spread = statistics.stdev(values) if len(values) > 1 else None
        unit = "ms" if metric == "ms" else "ratio"
        out.append(common | {"unit": unit, "values": values, "mean": statistics.mean(values), "std": spread, "n": len(values)})
        print(f"{case:18s} {label:30s} {share!s:6s} {metric:20s} {statistics.mean(values):8.4f}", flush=True)

    for share in map(str, SHARES):
        for label, runs in (("before", before), ("", after)):
            found = [numbers_of(run, share) for run in runs]
            for metric in found[0] if found else ():
                add(label, float(share), metric, [numbers[metric] for numbers in found])
        if before:
            ratios = [old["ms"][share] / new["ms"][share] for old, new in zip(before, after, strict=True)]
            add("", float(share), "before / after", ratios)
    for label, runs in (("before", before), ("", after)):
        if runs:
            add(label, "dense", "ms", [run["ms"][DENSE] for run in runs])
            add(label, "dense", "fixed time", [fixed_time(run) / run["ms"][DENSE] for run in runs])
    for part in after[0]["parts"]:
        add(part, THIN, "share of the time", [run["parts"][part] / run["ms"][THIN] for run in after])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout of smartprune")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=(*bench.SIDES, *bench.CHAINS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--engines", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.repeats, args.engines)
        return
    found = []
    for case in args.cases:
        after, before = [], []
        for _ in range(args.rounds):
            if args.before is not None:
                before.append(measure(args.before, case, args, engines=False))
            after.append(measure(ROOT, case, args, engines=True))
        found += rows(case, after, before)
    if args.out is not None:
        settings = {"rounds": args.rounds, "repeats": args.repeats, "sparsities": SHARES, "load": os.getloadavg()[0]}
        if args.before is not None:
            command = ["git", "-C", str(args.before), "rev-parse", "HEAD"]
            settings["before"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        machine = f"{bench.processor()}, 1 thread, Python {platform.python_version()}, torch {torch.__version__}"
        save_record(
            args.out, {"rows": found}, settings, NOTE, [f"python bench/int8_limit.py --before FOLDER --out {args.out}"], [machine]
        )


if __name__ == "__main__":
    main()
