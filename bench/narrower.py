"""Is a pruned network better than a narrower dense network, int8 or removed channels, at equal time, MACs or size?

python bench/narrower.py [--seeds 3] [--width 32] [--narrow 12] [--out FILE.json] [--plot FILE.svg]
python bench/narrower.py --read FILE.json --plot FILE.svg

Digits and resnet8 on one thread. A dense network of each smaller width is trained from scratch. The wide network is trained for
15 epochs, and pruned to the MACs of the narrower one in 20 epochs of search and 15 of fine-tuning: Smart and Gradual remove
blocks of 8x4, and Smart removes output channels, which sp.compact takes out. Compaction removes inputs too, and leaves empty
channels that a residual addition needs, so the MACs of that form differ. All networks are trained for 50 epochs in total, and
each is measured in float32 and in int8. ``macs`` in the rows is the share of the wide network's MACs that the budget removes.

The time is processor time for a batch of 16 images, with the fastest of torch, onnxruntime and accelerate, as a share of that of
the wide network in float32, which is timed again in every round. The size is that of a packed file in float32, and of an ONNX
file with sparse weights in int8. Needs: pip install 'smartprune[onnx]'.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from saliency_start import BATCH, accuracy, run, summary
from torch import Tensor, nn

import smartprune as sp
from smartprune.core.usage import measure
from smartprune.experiments.bench.adapters import onnxruntime_engine
from smartprune.experiments.compare.chart import Chart, Point, Series, save_charts
from smartprune.tasks.digits import Digits

BLOCK, CHANNELS = (8, 4), (1, None, None, None)
DENSE, SEARCH, TUNING = 15, 20, 15  # epochs
RATE, LATER_RATE = 0.1, 0.05
PRUNED: dict[str, tuple[Any, tuple[int | None, ...]]] = {
    "smart": (sp.Smart(), BLOCK),
    "gradual": (sp.Gradual(), BLOCK),
    "channels by smart": (sp.Smart(end=1e-4), CHANNELS),  # few blocks: at the default temperature the mask is not hard enough
}
IMAGES, ROUNDS, CALLS = 16, 7, 40
ACCURACY, MACS, TIME, SIZE = "accuracy", "MACs, share of the wide network", "time, share of the wide network", "KB"
Engine = Callable[[], Any]


def pruned(task: Digits, dense: nn.Module, form: str, macs: int, seed: int) -> tuple[nn.Module, int]:
    """The network, and the MACs that are left: at most ``macs`` with blocks, and those of the smaller network with channels."""
    method, block = PRUNED[form]
    model = copy.deepcopy(dense)
    batches = list(task.data("train", torch.device("cpu")).batches(BATCH, seed, 0))
    example = batches[0][0][:1]
    usage = measure(model, example)
    prunable = sum(layer.params * usage.uses(layer)[0] for layer in sp.plan(model, block, 0.5).layers)
    share = (usage.macs - macs) / prunable
    pruner = sp.attach(model, method, block, budget=sp.macs(share, example=example), steps=SEARCH * len(batches), example=example)
    run(task, model, SEARCH + TUNING, LATER_RATE, seed, pruner)
    receipt = sp.bake(model)
    if block == CHANNELS:
        model = sp.compact(model, example)
        return model, measure(model, example).macs
    assert receipt.model_macs is not None
    assert receipt.model_macs.kept <= macs
    return model, receipt.model_macs.kept


def seconds_per_call(engine: Engine) -> float:
    began = time.process_time()
    for _ in range(CALLS):
        engine()
    return (time.process_time() - began) / CALLS


def relative_time(engines: Sequence[Engine], base: Sequence[Engine]) -> float:
    """The time of the fastest engine as a share of that of the fastest base engine, the median of several rounds."""
    for engine in [*engines, *base]:
        seconds_per_call(engine)
    rounds = [(min(map(seconds_per_call, engines)), min(map(seconds_per_call, base))) for _ in range(ROUNDS)]
    return statistics.median(own / other for own, other in rounds)


def engines_of(model: nn.Module, x: Tensor, calibration: list[Tensor], int8: bool, folder: Path) -> tuple[list[Engine], Any, float]:
    """The engines with their inputs, the model as accelerate computes it, and the size of its file in KB."""
    fast = sp.accelerate(model, example=calibration, dtype="int8" if int8 else "float32", threads=1)
    path = folder / "model.onnx"
    sp.export_onnx(model, path, x, block=BLOCK, int8=int8, calibration=calibration if int8 else None, sparse=True)
    engines: list[Engine] = [onnxruntime_engine(path, x, 1), torch.inference_mode()(lambda: fast(x))]
    if int8:
        return engines, fast, path.stat().st_size / 1000
    engines.append(torch.inference_mode()(lambda: model(x)))
    packed = folder / "model.packed.safetensors"
    sp.pack(model, packed, block=BLOCK)
    return engines, fast, packed.stat().st_size / 1000


def measured(task: Digits, model: nn.Module, int8: bool, base: Sequence[Engine]) -> tuple[list[Engine], dict[str, float]]:
    calibration = [x for x, _ in task.data("train", torch.device("cpu")).batches(BATCH, 0, 0)][:8]
    x = next(iter(task.data("test", torch.device("cpu")).batches(IMAGES, 0, 0)))[0]
    with tempfile.TemporaryDirectory() as folder:
        engines, fast, size = engines_of(model.eval(), x, calibration, int8, Path(folder))
        share = relative_time(engines, base) if base else 1.0
    return engines, {ACCURACY: accuracy(task, fast), TIME: share, SIZE: size}


def networks(task: Digits, wide: nn.Module, narrow: int, seed: int, total: int) -> dict[str, tuple[nn.Module, float]]:
    """The networks with the MACs of the narrower one by name, with the share of the MACs that they have."""
    other = Digits(width=narrow)
    torch.manual_seed(seed)
    model = other.model("resnet8")
    macs = measure(model, task.example()).macs
    run(other, model, DENSE + SEARCH + TUNING, RATE, seed)
    found = {f"dense, {narrow} channels wide": (model, macs / total)}
    for form in PRUNED:
        model, left = pruned(task, wide, form, macs, seed)
        found[form] = model, left / total
    return found


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    task = Digits(width=args.width)
    values: dict[tuple[str, float | str, str], list[float]] = {}
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        wide = task.model("resnet8")
        total = measure(wide, task.example()).macs
        run(task, wide, DENSE, RATE, seed)
        longer = copy.deepcopy(wide)
        run(task, longer, SEARCH + TUNING, LATER_RATE, seed)
        base, _ = measured(task, longer, False, ())
        cells: list[tuple[str, float | str, nn.Module, float]] = [(f"dense, {args.width} channels wide", "dense", longer, 1.0)]
        for narrow in args.narrow:
            found = networks(task, wide, narrow, seed, total)
            removed = round(1 - next(iter(found.values()))[1], 4)
            cells += [(name, removed, model, share) for name, (model, share) in found.items()]
        for name, removed, model, share in cells:
            for int8 in (False, True):
                _, numbers = measured(task, model, int8, base)
                for metric, number in {**numbers, MACS: share}.items():
                    values.setdefault((name + ", int8" * int8, removed, metric), []).append(number)
                print(seed, removed, f"{name}{', int8' * int8:6}", {k: round(v, 4) for k, v in numbers.items()}, flush=True)
        if args.out:  # also after every seed, because all of them take long
            save(args, rows_of(values))
    return rows_of(values)


def rows_of(values: dict[tuple[str, float | str, str], list[float]]) -> list[dict[str, Any]]:
    common: dict[str, Any] = {"model": "resnet8", "data": "digits", "block": "x".join(map(str, BLOCK)), "sparsity": None}
    common["protocol"] = f"{DENSE + SEARCH + TUNING} epochs in total"
    return [
        {**common, "method": method, "macs": removed, "metric": metric}
        | ({} if metric == SIZE else {"unit": "share"})
        | summary(numbers)
        for (method, removed, metric), numbers in values.items()
    ]


def save(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    settings = {"seeds": args.seeds, "widths": [args.width, *args.narrow], "threads": 1, "torch": torch.__version__}
    args.out.write_text(json.dumps({"rows": rows, **settings}, indent=1) + "\n")


def charts(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """Accuracy against time, MACs and size. A line joins the sizes of one form."""
    means = {(row["method"], row["macs"], row["metric"]): (row["mean"], row["std"]) for row in rows}
    groups: dict[str, list[tuple[str, Any]]] = {}
    for method, removed in dict.fromkeys((row["method"], row["macs"]) for row in rows):
        name = "dense" if method.startswith("dense") else method.removesuffix(", int8")
        groups.setdefault(name + ", int8" * method.endswith("int8"), []).append((method, removed))
    out = []
    for metric in (TIME, MACS, SIZE):
        scale = 1 if metric == SIZE else 100
        series = []
        for name, keys in groups.items():
            points = []
            for key in keys:
                (level, spread), (x, _) = means[*key, ACCURACY], means[*key, metric]
                points.append(Point(scale * x, 100 * level, None if spread is None else 100 * spread))
            series.append(Series(name, tuple(sorted(points, key=lambda point: point.x))))
        label = "size of the file in KB" if metric == SIZE else f"{metric.partition(',')[0]}, % of the wide network"
        out.append(Chart(f"resnet8 on digits, against {label.partition(',')[0]}", label, "accuracy, %", tuple(series), None, True))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--narrow", nargs="+", type=int, default=[12])
    parser.add_argument("--read", type=Path, metavar="FILE.json", help="draw a file of an earlier call; measure nothing")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = json.loads(args.read.read_text())["rows"] if args.read else measure_all(args)
    if args.plot:
        save_charts(charts(rows), args.plot)


if __name__ == "__main__":
    main()
