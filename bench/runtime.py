"""How much faster is a pruned network when zero blocks are skipped, compared with the fastest dense engine installed?

python bench/runtime.py [--models resnet18 ...] [--sparsity 0.5 0.7 0.9 0.95 0.97] [--batch 1 8] [--threads 1] [--rounds 5]
                        [--profile 0.5 | --model-file FILE.safetensors] [--quick] [--out FILE.json]

Engines are those of ``smartprune bench``, each in its own process; all but the one being timed are stopped. They take turns in
rounds. The time of a round is the least of its calls, and a speed-up compares times of one round. The dense baseline is the
fastest of torch (both memory layouts), onnxruntime and OpenVINO, as far as installed, in float32 and, for int8, of the last two.
The output of every engine is compared with that of torch before it is timed.

Random weights are hard for int8. Other engines with int8 take part up to an RMS error as large as the standard deviation of the
outputs, smartprune up to half of it; the rows contain the errors. Engines with larger errors, or that cannot run the network, are
listed and left out. smartprune with float32 must take part.

Cases are whole networks, and chains of eight equal layers, which show kinds of layers. Unless a file provides learned zeros, random
blocks of a network are zero. A layer of n blocks keeps a share proportional to n ** -0.5, so small layers stay denser, as with
learned masks. Chains are pruned uniformly.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune
from smartprune.experiments.bench.engines import CPU, DENSE, DENSE_INT8, OURS, OURS_INT8, available_engines, package_versions
from smartprune.experiments.bench.result import Timing
from smartprune.experiments.bench.run import EngineProcess, time_in_turns, write_case
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
RIVAL_INT8 = 1.0  # the error that other engines' int8 may have


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
        for norm in norms:  # random zeros can disconnect a channel, and its variance would be near zero; training prevents that
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
    for _ in range(100):  # the factor that keeps the requested number of blocks
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


# ---- the run


@dataclass(frozen=True)
class Lane:
    """The times of an engine, the requested and the actual share of zero blocks, and the share of MACs that is left."""

    timing: Timing
    label: str
    requested: float | None = None
    zero: float = 0.0
    macs: float = 1.0


def measure(case: str, batch: int, args: argparse.Namespace) -> list[Lane]:
    """Times dense engines once, and smartprune at every sparsity. Adds what cannot run to ``args.left_out``."""
    torch.manual_seed(2)
    x = torch.randn(batch, *shape(case))
    torch.manual_seed(1)
    calibration = [torch.randn_like(x) for _ in range(3)]
    group: list[EngineProcess] = []
    descriptions: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        for sparsity in args.sparsity:
            folder = Path(temporary) / str(sparsity)
            folder.mkdir()
            model = build(case, sparsity, args.model_file, args.profile)
            names = [name for name in args.engines if name in (OURS, OURS_INT8) or sparsity == args.sparsity[0]]
            left_out = write_case(model, x, calibration, folder, names, BLOCK)
            zeros = sparsity, zero_share(model), kept_macs(model, x)
            for name in names:
                label = f"{name} {sparsity}" if name in (OURS, OURS_INT8) else name
                if name not in left_out:
                    allowed = RIVAL_INT8 if name in DENSE_INT8 else None
                    engine = stack.enter_context(closing(EngineProcess(name, folder, args.threads, allowed)))
                    if engine.failed is None:
                        group.append(engine)
                        descriptions.append((label, *zeros) if name in (OURS, OURS_INT8) else (label,))
                        continue
                    left_out[name] = engine.failed
                args.left_out.append(f"{label}, {case}, batch {batch}: {left_out[name]}")
                if name == OURS:
                    raise SystemExit(args.left_out[-1])
                print(args.left_out[-1], flush=True)
        timings = time_in_turns(group, batch, args.rounds, args.seconds)
    lanes = [Lane(timing, *description) for timing, description in zip(timings, descriptions, strict=True)]
    return sorted(lanes, key=lambda lane: CPU.index(lane.timing.engine))


def row(case: str, batch: int, method: str, sparsity: float, metric: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    common = {"model": case, "data": "random", "method": method, "block": "x".join(map(str, BLOCK)), "sparsity": sparsity}
    common |= {"protocol": f"batch {batch}", "metric": metric, "values": list(values), "mean": statistics.fmean(values)}
    return {**common, "std": std, "n": len(values), **more}


def rows_of(case: str, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    lanes = measure(case, batch, args)
    out = []
    print(f"\n{case}, batch {batch}, {args.threads} threads: least ms of {args.rounds} rounds")
    for lane in lanes:
        timing = lane.timing
        more: dict[str, Any] = {"least": timing.ms, "error": timing.error}
        if lane.requested is not None:
            more["asked"] = lane.requested
        out.append(row(case, batch, timing.engine, round(lane.zero, 6), "ms", timing.rounds, **more))
        print(f"  {lane.label:24s} {timing.ms:9.4f}  error {timing.error:.1e}")
    for ours, rivals in ((OURS, DENSE), (OURS_INT8, DENSE_INT8), (OURS_INT8, DENSE)):
        rival = min((lane.timing for lane in lanes if lane.timing.engine in rivals), key=lambda timing: timing.ms, default=None)
        for lane in lanes:
            if rival is None or lane.timing.engine != ours:
                continue
            ratios = [a / b for a, b in zip(rival.rounds, lane.timing.rounds, strict=True)]
            top = rival.ms / lane.timing.ms
            by_blocks, by_macs = 1 / (1 - lane.zero), 1 / lane.macs
            more = {"to": rival.engine, "of_least": top, "ideal_blocks": by_blocks, "ideal_macs": by_macs, "asked": lane.requested}
            out.append(row(case, batch, ours, round(lane.zero, 6), "times faster", ratios, **more))
            ideals = f"1 / kept: blocks {by_blocks:.1f}, MACs {by_macs:.1f}"
            print(f"  {ours:16s} {lane.zero:6.1%} zero: {top:6.2f} times as fast as {rival.engine} ({ideals})", flush=True)
    return out


def stage_rows(rows: list[dict[str, Any]], batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The four stages of ResNet18 added up, each against its own fastest dense engine."""
    out = []
    for ours, rivals in ((OURS, DENSE), (OURS_INT8, DENSE_INT8)):
        for sparsity in args.sparsity:
            sparse_ms = dense_ms = 0.0
            for case in STAGES:
                timed = [r for r in rows if r["model"] == case and r["metric"] == "ms" and r["protocol"] == f"batch {batch}"]
                dense = [r["least"] for r in timed if r["method"] in rivals]
                fast = [r["least"] for r in timed if r["method"] == ours and r["asked"] == sparsity]
                if not dense or not fast:
                    break
                sparse_ms, dense_ms = sparse_ms + fast[0], dense_ms + min(dense)
            else:
                more = {"to": "fastest dense per stage", "ideal_blocks": 1 / (1 - sparsity), "asked": sparsity}
                out.append(row("ResNet18 stages, added up", batch, ours, sparsity, "times faster", [dense_ms / sparse_ms], **more))
                print(f"ResNet18 stages added up, batch {batch}, {ours} {sparsity}: {dense_ms / sparse_ms:.2f}")
    return out


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The checked settings, and the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="*", default=None, help=f"of {', '.join((*SIDES, *CHAINS))}; also 'networks' and 'chains'"
    )
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--batch", nargs="+", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=None, choices=CPU, metavar="NAME", help=f"of {', '.join(CPU)}")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of timing per engine and round")
    parser.add_argument(
        "--profile", type=float, default=0.5, help="a layer of n blocks keeps a share ~ n ** -profile; 0: all the same"
    )
    parser.add_argument("--model-file", help="a baked model of --models, with learned zeros (safetensors)")
    parser.add_argument("--quick", action="store_true", help="ResNet18 and one chain, few rounds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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
        if not Path(args.model_file).is_file():
            parser.error(f"--model-file {args.model_file} is not a file")
        args.sparsity = args.sparsity[:1]  # the file brings its own zeros
    if min(*args.batch, args.threads, args.rounds, args.seconds) <= 0 or not all(0 <= s < 1 for s in args.sparsity):
        parser.error("--batch, --threads, --rounds and --seconds should be above 0, --sparsity from 0 to less than 1")
    args.sparsity = list(dict.fromkeys(args.sparsity))
    names, missing = available_engines()
    wanted = args.engines or CPU
    args.left_out = [f"{name}: {why}" for name, why in missing.items() if name in wanted]
    args.engines = [name for name in names if name in wanted]
    if not args.engines:
        parser.error(f"no engine to time: {'; '.join(args.left_out)}")
    return args, cases


def main() -> None:
    args, cases = parse_arguments()
    torch.set_num_threads(1)  # batch norm statistics do not depend on the machine
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
        record = {
            "question": "a pruned network against the fastest dense engine",
            "block": list(BLOCK),
            "zeros": zeros,
            "sides": SIDES,
            "chains": f"{DEPTH} layers with ReLU, called as one network",
            "device": processor(),
            "threads": args.threads,
            "rounds": args.rounds,
            "versions": {**package_versions(), "python": platform.python_version(), "smartprune": smartprune.__version__},
            "left_out": args.left_out,
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwritten to {args.out}")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
