"""How much faster is a pruned network when its zero blocks are skipped, against the fastest dense engine at hand?

python bench/runtime.py [--models resnet18 ...] [--sparsity 0.5 0.7 0.9 0.95 0.97] [--batch 1 8] [--threads 1] [--rounds 5]
                        [--profile 0.5 | --model-file FILE.safetensors] [--quick] [--out FILE.json]

Every engine lives in a process of its own, and all but the one being timed are stopped, so that no pool of threads
disturbs another. They take turns in rounds; a round's time is the least of its calls, and a speed-up compares times of
one round. The dense baseline is the fastest of torch (both memory layouts), onnxruntime and OpenVINO, as far as
installed, in float32 and, for int8, of the last two. Every engine's output is compared with torch's in the same run.

Cases are whole networks, and chains of eight equal layers, which show layer kinds. The zeros of a network: unless a file
brings learned ones, a layer of n blocks keeps a share proportional to n ** -0.5, random blocks, so that small layers
stay denser, as learned masks have it. Chains are pruned uniformly.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune
from smartprune.models import MODELS

BLOCK = (16, 8)
SPARSITIES = (0.5, 0.7, 0.9, 0.95, 0.97)
SIDES = {"resnet18": 32, "mobilenetv2": 32, "resnet50": 224, "yolov5m": 320, "bisenetv2": 512}
CHAINS = {  # channels, kernel, side of the map; two numbers of channels take turns
    "3x3 64 @32": (64, 64, 3, 32),
    "3x3 128 @16": (128, 128, 3, 16),
    "3x3 256 @8": (256, 256, 3, 8),
    "3x3 512 @4": (512, 512, 3, 4),
    "3x3 64 @56": (64, 64, 3, 56),
    "3x3 128 @28": (128, 128, 3, 28),
    "3x3 256 @14": (256, 256, 3, 14),
    "3x3 512 @7": (512, 512, 3, 7),
    "1x1 256-1024 @14": (256, 1024, 1, 14),
    "1x1 128-512 @28": (128, 512, 1, 28),
    "1x1 64-256 @56": (64, 256, 1, 56),
}
STAGES = ("3x3 64 @32", "3x3 128 @16", "3x3 256 @8", "3x3 512 @4")  # of ResNet18: their times are also added up
DEPTH = 8  # layers of a chain
DENSE = ("torch NCHW", "torch NHWC", "onnxruntime", "openvino")
DENSE_INT8 = ("onnxruntime int8", "openvino int8")
OURS = ("smartprune", "smartprune int8")
CLOSE, CLOSE_INT8, RIVAL_INT8 = 1e-3, 0.5, 1.0  # of the largest output; of the RMS output: of ours, of others; see the rows
Run = Callable[[], Any]


# ---- what is run


def build(case: str, sparsity: float, file: str | None, profile: float = 0.5) -> nn.Module:
    """The network or chain, with its zeros and with batch norms that have seen data."""
    torch.manual_seed(0)
    if case in CHAINS:
        a, b, kernel, _ = CHAINS[case]
        layers: list[nn.Module] = []
        for i in range(DEPTH):
            layers += [nn.Conv2d(*((a, b) if i % 2 == 0 else (b, a)), kernel, padding=kernel // 2), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers)
    else:
        model = MODELS[case]()
    if file is not None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(file))
        return model.eval()
    prune(model, sparsity, 0.0 if case in CHAINS else profile)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if norms:
        for norm in norms:
            norm.momentum = 1.0
        model.train()
        with torch.no_grad():
            model(torch.randn(4, *shape(case)))
        for norm in norms:  # a channel that random zeros cut off would be blown up from nothing; training would not leave it so
            assert norm.running_var is not None
            norm.running_var.clamp_(min=0.05 * float(norm.running_var.mean()))
    return model.eval()


def prunable(model: nn.Module) -> list[tuple[Tensor, Any]]:
    """The weights that the planner would prune, and their grids; of a chain, all."""
    if isinstance(model, nn.Sequential):
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    else:
        names = [layer.name for layer in smartprune.plan(model, block=BLOCK, sparsity=0.5).layers]
    weights: list[Tensor] = [model.get_submodule(name).weight for name in names]  # type: ignore[misc]
    return [(weight, smartprune.Block(*BLOCK).grid(tuple(weight.shape))) for weight in weights]


def prune(model: nn.Module, sparsity: float, profile: float) -> None:
    """Zeroes random blocks; a layer of n blocks keeps a share proportional to n ** -profile."""
    layers = prunable(model)
    total = sum(grid.n for _, grid in layers)
    low, high = 0.0, 1e9
    for _ in range(100):  # the factor that keeps as many blocks as asked
        factor = (low + high) / 2
        kept = sum(grid.n * min(1.0, factor * grid.n**-profile) for _, grid in layers)
        low, high = (factor, high) if kept < (1 - sparsity) * total else (low, factor)
    for weight, grid in layers:
        chosen = torch.zeros(grid.n)
        chosen[torch.randperm(grid.n)[: max(1, round(min(1.0, low * grid.n**-profile) * grid.n))]] = 1.0
        weight.data *= grid.expand(chosen)


def shape(case: str) -> tuple[int, int, int]:
    if case in CHAINS:
        return CHAINS[case][0], CHAINS[case][3], CHAINS[case][3]
    return 3, SIDES[case], SIDES[case]


def kept_macs(model: nn.Module, x: Tensor) -> float:
    """The share of all multiplications whose weight is not in a zero block: what even a perfect engine must do."""
    sums = [0.0, 0.0]

    def count(module: nn.Module, _: Any, out: Tensor) -> None:
        weight: Tensor = module.weight  # type: ignore[assignment]
        grid = smartprune.Block(*BLOCK).grid(tuple(weight.shape), int(getattr(module, "groups", 1)))
        kept = grid.expand((grid.sum(weight.detach().abs()) > 0).float())
        places = out.numel() / weight.shape[0]
        sums[0] += float(kept.sum()) * places
        sums[1] += weight.numel() * places

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model(x[:1])
    for hook in hooks:
        hook.remove()
    return sums[0] / sums[1]


def zero_share(model: nn.Module) -> float:
    """The share of blocks that are zero, over the layers that the planner would prune."""
    sums = torch.cat([grid.sum(weight.detach().abs()) for weight, grid in prunable(model)])
    return float((sums == 0).double().mean())


# ---- engines: each gives a function that runs once and returns the outputs


def engine(name: str, model: nn.Module, x: Tensor, threads: int, folder: Path) -> Run:
    if name.startswith("torch"):
        torch.set_num_threads(threads)
        kind = torch.channels_last if name.endswith("NHWC") else torch.contiguous_format
        own, y = model.to(memory_format=kind), x.contiguous(memory_format=kind)  # type: ignore[call-overload]
        return torch.inference_mode()(lambda: own(y))
    if name == "smartprune":
        fast = smartprune.accelerate(model, example=x, threads=threads)
        return lambda: fast(x)
    if name == "smartprune int8":
        fast = smartprune.accelerate(model, dtype="int8", example=[x, *calibration(x)], threads=threads)
        return lambda: fast(x)
    path = folder / ("int8.onnx" if name.endswith("int8") else "float.onnx")
    data = x.numpy()
    if name.startswith("onnxruntime"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: data}
        return lambda: session.run(None, feed)
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: list(request.infer([data], share_inputs=True, share_outputs=True).values())


def calibration(x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn_like(x) for _ in range(3)]


def export(model: nn.Module, x: Tensor, folder: Path, int8: bool) -> None:
    smartprune.export_onnx(model, folder / "float.onnx", x, BLOCK, dynamic_batch=False, tolerance=1.0)
    if int8:
        smartprune.export_onnx(
            model, folder / "int8.onnx", x, BLOCK, int8=True, calibration=[x, *calibration(x)], dynamic_batch=False, tolerance=1.0
        )


def arrays(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in arrays(part)]
    return [torch.from_numpy(result.copy())]


def error(name: str, run: Run, model: nn.Module, x: Tensor) -> float:
    """How far the outputs lie from torch's; a wrong engine is not worth timing."""
    with torch.no_grad():
        theirs = arrays(model(x))
    worst = 0.0
    for a, b in zip(arrays(run()), theirs, strict=True):
        if name.endswith("int8"):
            worst = max(worst, float((a - b).norm() / (b - b.mean()).norm()))
        else:
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    allowed = CLOSE if not name.endswith("int8") else CLOSE_INT8 if name in OURS else RIVAL_INT8
    if not worst <= allowed:
        print(json.dumps({"failed": f"the output is off by {worst:.3g}"}), flush=True)
        raise SystemExit(f"{name}: the output is off by {worst:.3g}")
    return worst


# ---- a worker: builds its engines, then times them when told


def worker(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(2)
    x = torch.randn(spec["batch"], *shape(spec["case"]))
    runs: dict[str, Run] = {}
    told: dict[str, Any] = {"errors": {}, "zero": {}, "macs": {}, "refused": {}}
    for sparsity in spec["sparsities"]:
        model = build(spec["case"], sparsity, spec["file"], spec["profile"])
        if spec["engine"] == "export":
            export(model, x, Path(spec["folder"]), spec["int8"])
            continue
        key = str(sparsity)
        try:
            runs[key] = engine(spec["engine"], model, x, spec["threads"], Path(spec["folder"]))
        except smartprune.SmartpruneError as refusal:  # int8 that is too coarse for this network
            told["refused"][key] = str(refusal)
            continue
        told["errors"][key] = error(spec["engine"], runs[key], model, x)
        told["zero"][key], told["macs"][key] = zero_share(model), kept_macs(model, x)
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        key, seconds = line.split()
        print(json.dumps(timed(runs[key], float(seconds))), flush=True)


def timed(run: Run, seconds: float) -> dict[str, float]:
    run()
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return {"best": min(times) * 1e3, "median": statistics.median(times) * 1e3, "calls": len(times)}


class Process:
    """A worker, stopped unless it is its turn."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name = spec["engine"]
        command = [sys.executable, __file__, "--worker", json.dumps(spec)]
        env = os.environ | {"OMP_NUM_THREADS": str(spec["threads"])}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        line = self._read()
        self.told: dict[str, Any] = json.loads(line)
        if "failed" not in self.told:
            self._pause()

    def _read(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # engines print things of their own
                return line
        raise SystemExit(f"{self.name}: failed, see above")

    def _pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def time(self, key: str, seconds: float) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{key} {seconds}\n")
        self.process.stdin.flush()
        out: dict[str, float] = json.loads(self._read())
        self._pause()
        return out

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- the run


def measure(case: str, batch: int, args: argparse.Namespace) -> tuple[dict[str, list[dict[str, float]]], dict[str, Any]]:
    """For every engine (ours: and sparsity) the times of all rounds; and what the workers told."""
    times: dict[str, list[dict[str, float]]] = {}
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = {"case": case, "batch": batch, "threads": args.threads, "file": args.model_file, "folder": folder}
        common["profile"] = args.profile
        names = [name for name in (*DENSE, *DENSE_INT8, *OURS) if name in args.engines]
        first = args.sparsity[:1]
        if any(name.startswith(("onnxruntime", "openvino")) for name in names):
            int8 = any(name in DENSE_INT8 for name in names)
            Process({**common, "engine": "export", "sparsities": first, "int8": int8}).close()
        workers: list[tuple[Process, str, str]] = []
        processes: list[Process] = []
        try:
            for name in names:
                ours = name in OURS
                process = Process({**common, "engine": name, "sparsities": args.sparsity if ours else first})
                if "failed" in process.told:  # a wrong engine is not a rival
                    args.left_out.append(f"{name}, {case}, batch {batch}: {process.told['failed']}")
                    if ours:
                        raise SystemExit(args.left_out[-1])
                    continue
                processes.append(process)
                for sparsity in args.sparsity if ours else first:
                    label = f"{name} {sparsity}" if ours else name
                    if str(sparsity) in process.told["refused"]:
                        args.left_out.append(f"{label}, {case}, batch {batch}: {process.told['refused'][str(sparsity)]}")
                        print(args.left_out[-1])
                        continue
                    workers.append((process, str(sparsity), label))
                    told[label] = {what: process.told[what][str(sparsity)] for what in ("errors", "zero", "macs")}
            for turn in range(args.rounds):
                shift = turn % len(workers)
                for process, key, label in workers[shift:] + workers[:shift]:
                    times.setdefault(label, []).append(process.time(key, args.seconds))
        finally:  # also when one of them fails: a stopped process would stay for ever
            for process in processes:
                process.close()
    return times, told


def row(case: str, batch: int, method: str, sparsity: float, metric: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    common = {"model": case, "data": "random", "method": method, "block": "x".join(map(str, BLOCK)), "sparsity": sparsity}
    common |= {"protocol": f"batch {batch}", "metric": metric, "values": list(values), "mean": statistics.fmean(values)}
    return {**common, "std": std, "n": len(values), **more}


def rows_of(case: str, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    times, told = measure(case, batch, args)
    out = []
    best = {label: [t["best"] for t in rounds] for label, rounds in times.items()}
    for label, values in best.items():
        name, _, sparsity = label.partition(" 0.") if label.startswith(OURS) else (label, "", "")
        share = round(told[label]["zero"], 6) if sparsity else 0.0
        asked = {"asked": float(f"0.{sparsity}")} if sparsity else {}
        median = statistics.median(t["median"] for t in times[label])
        out.append(
            row(case, batch, name, share, "ms", values, least=min(values), median=median, error=told[label]["errors"], **asked)
        )
    print(f"\n{case}, batch {batch}, {args.threads} threads: least ms of {args.rounds} rounds")
    for label, values in best.items():
        print(f"  {label:24s} {min(values):9.4f}  error {told[label]['errors']:.1e}")
    for ours, rivals in ((OURS[0], DENSE), (OURS[1], DENSE_INT8), (OURS[1], DENSE)):
        there = [name for name in rivals if name in best]
        if ours not in args.engines or not there:
            continue
        rival = min(there, key=lambda name: min(best[name]))
        for sparsity in args.sparsity:
            label = f"{ours} {sparsity}"
            if label not in best:  # refused
                continue
            ratios = [a / b for a, b in zip(best[rival], best[label], strict=True)]
            zero = told[label]["zero"]
            top = min(best[rival]) / min(best[label])
            by_blocks, by_macs = 1 / (1 - zero), 1 / told[label]["macs"]
            more = {"to": rival, "of_least": top, "ideal_blocks": by_blocks, "ideal_macs": by_macs, "asked": sparsity}
            out.append(row(case, batch, ours, round(zero, 6), "times faster", ratios, **more))
            ideals = f"1 / kept: blocks {by_blocks:.1f}, MACs {by_macs:.1f}"
            print(f"  {ours:16s} {zero:6.1%} zero: {top:6.2f} times as fast as {rival} ({ideals})", flush=True)
    return out


def stage_rows(rows: list[dict[str, Any]], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The four stages of ResNet18 added up, each against its own fastest dense engine."""
    out = []
    for ours, rivals in ((OURS[0], DENSE), (OURS[1], DENSE_INT8)):
        for sparsity in args.sparsity:
            mine = theirs = 0.0
            for case in STAGES:
                here = [r for r in rows if r["model"] == case and r["metric"] == "ms" and r["protocol"] == f"batch {batch}"]
                dense = [r["least"] for r in here if r["method"] in rivals]
                fast = [r["least"] for r in here if r["method"] == ours and r["asked"] == sparsity]
                if not dense or not fast:
                    break
                mine, theirs = mine + fast[0], theirs + min(dense)
            else:
                more = {"to": "fastest dense per stage", "ideal_blocks": 1 / (1 - sparsity), "asked": sparsity}
                out.append(row("ResNet18 stages, added up", batch, ours, sparsity, "times faster", [theirs / mine], **more))
                print(f"ResNet18 stages added up, batch {batch}, {ours} {sparsity}: {theirs / mine:.2f}")
    return out


def installed(name: str) -> bool:
    package = name.split()[0]
    return package in ("torch", "smartprune") or importlib.util.find_spec(package) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument(
        "--models", nargs="*", default=None, help=f"of {', '.join((*SIDES, *CHAINS))}; also 'networks' and 'chains'"
    )
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--batch", nargs="+", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=None, help=f"of {', '.join((*DENSE, *DENSE_INT8, *OURS))}")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of timing per engine and round")
    parser.add_argument(
        "--profile", type=float, default=0.5, help="a layer of n blocks keeps a share ~ n ** -profile; 0: all the same"
    )
    parser.add_argument("--model-file", help="a baked model of --models, with learned zeros (safetensors)")
    parser.add_argument("--quick", action="store_true", help="ResNet18 and one chain, few rounds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker))
        return
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.seconds = args.seconds or (0.1 if args.quick else 0.3)
    args.batch = args.batch or ([1] if args.quick else [1, 8])
    named = args.models or (["resnet18", "3x3 256 @8"] if args.quick else ["chains", "networks"])
    cases = [c for name in named for c in (SIDES if name == "networks" else CHAINS if name == "chains" else [name])]
    if unknown := [c for c in cases if c not in SIDES and c not in CHAINS]:
        parser.error(f"unknown models: {', '.join(unknown)}")
    if args.model_file is not None and (len(cases) != 1 or cases[0] in CHAINS):
        parser.error("--model-file needs exactly one network in --models")
    if args.model_file is not None:
        args.sparsity = args.sparsity[:1]  # the file brings its own zeros
    args.engines = [n for n in args.engines or (*DENSE, *DENSE_INT8, *OURS) if installed(n)]
    args.left_out = []
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        for case in cases:
            rows += rows_of(case, batch, args)
        rows += stage_rows(rows, batch, args)
    if args.out is not None:
        zeros = (
            "learned, from a file"
            if args.model_file
            else f"random blocks; networks: kept share of a layer of n blocks ~ n ** -{args.profile}"
        )
        versions = {"torch": torch.__version__, "python": platform.python_version(), "smartprune": smartprune.__version__}
        for package in ("onnxruntime", "openvino"):
            if importlib.util.find_spec(package) is not None:
                versions[package] = str(importlib.import_module(package).__version__)
        told = {
            "question": "a pruned network against the fastest dense engine",
            "block": list(BLOCK),
            "zeros": zeros,
            "sides": SIDES,
            "chains": f"{DEPTH} layers with ReLU, called as one network",
            "device": processor(),
            "threads": args.threads,
            "rounds": args.rounds,
            "versions": versions,
            "left_out": args.left_out,
            "rows": rows,
        }
        args.out.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nwritten to {args.out}")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
