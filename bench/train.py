"""How long does an epoch of CIFAR-10 take: dense, in the search and frozen, in eager mode and as a CUDA graph?

python bench/train.py [--device cuda] [--model resnet18] [--batch N] [--amp bf16] [--compile] [--epochs N] [--out FILE.json]

An epoch is what `smartprune train` does between two rows of its metrics: it shuffles, crops and flips 50,000 images on the
device, takes all steps, and reads the loss once. The images are noise, so no data is needed. All variants take turns in one
run; compare ratios, not seconds. On the CPU, use few images (--pictures 256).
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smartprune.tasks.cifar10 import Cifar10, Split
from smartprune.training.check import resolve
from smartprune.training.config import configure
from smartprune.training.run import Run, deterministic, enter_stage
from smartprune.training.step import take_step

KINDS = ("dense", "search", "frozen")
SEARCH_EPOCHS = 10_000  # more than are timed


def make_run(kind: str, args: argparse.Namespace, graph: str) -> Run:
    settings = {"task": "cifar10", "model": args.model, "batch": args.batch, "device": args.device, "search_epochs": SEARCH_EPOCHS}
    config = resolve(configure({**settings, "amp": args.amp, "compile": "on" if args.compile else "off"}))
    config = replace(config, graph=graph)
    device = torch.device(config.device)
    task = Cifar10()
    model = task.model(config.model).to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    images = torch.randint(0, 256, (args.pictures, 32, 32, 3), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (args.pictures,), device=device)
    run = Run(
        config=config,
        task=task,
        folder=Path(),
        device=device,
        model=model,
        data=Split(images, labels, True, 4, True),
        validation=Split(images[:0], labels[:0], False, 0, False),
        losses=torch.zeros((), dtype=torch.float64, device=device),
    )
    enter_stage(run, "dense" if kind == "dense" else "search")
    if kind == "frozen":
        assert run.pruner is not None
        run.pruner.freeze(force=True)
        enter_stage(run, "finetune")
    return run


def time_epoch(run: Run) -> float:
    """Seconds of one epoch."""
    if run.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run.losses.zero_()
    for batch in run.training_data.batches(run.config.batch, run.config.seed, run.epoch):
        take_step(run, batch)
    float(run.losses)  # synchronizes
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=Cifar10.models, default="resnet18")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--amp", choices=("auto", "bf16", "off"), default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pictures", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    config = resolve(configure({"task": "cifar10", "device": args.device, "amp": args.amp}))
    result: dict[str, Any] = {
        "question": "seconds per epoch: dense, search, frozen",
        "model": args.model,
        "batch": args.batch,
        "block": config.block,
        "sparsity": config.sparsity,
        "pictures": args.pictures,
        "amp": config.amp,
        "compile": args.compile,
        "n": args.epochs,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": [],
    }
    with deterministic(config):
        for mode in ("eager", "graph") if cuda else ("eager",):
            runs = {kind: make_run(kind, args, "auto" if mode == "graph" else "off") for kind in KINDS}
            for run in runs.values():
                time_epoch(run)  # compiles and selects kernels, and captures graphs
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(args.epochs):
                for kind, run in runs.items():
                    times[kind].append(time_epoch(run))
            for kind, run in runs.items():
                failed = run.graph.failed if run.graph is not None else None
                row = {"mode": mode, "kind": kind, "seconds": times[kind], "median": statistics.median(times[kind])}
                row |= {"over_dense": row["median"] / statistics.median(times["dense"]), "not_recorded": failed}
                result["rows"].append(row)
            del runs, run
    print(f"{args.model}, batch {args.batch}, amp {config.amp}, {result['device']}, n = {args.epochs} epochs, in turns\n")
    print(f"{'mode':8s} {'kind':8s} {'s/epoch':>9s} {'min':>9s} {'max':>9s} {'over dense':>11s}")
    for row in result["rows"]:
        seconds = row["seconds"]
        print(
            f"{row['mode']:8s} {row['kind']:8s} {row['median']:9.3f} {min(seconds):9.3f} {max(seconds):9.3f} "
            f"{row['over_dense']:11.3f}" + (f"  not captured: {row['not_recorded']}" if row["not_recorded"] else "")
        )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nresults written to {args.out}")


if __name__ == "__main__":
    main()
