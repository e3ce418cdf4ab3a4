"""How much of a network can be removed with its empty channels, and how small and fast is it in each runtime?

python bench/compact.py [--models resnet18 ...] [--blocks 16x8 ...] [--sparsity 0.7 0.9 0.95] [--forms] [--out FILE.json]

Masks are synthetic: random blocks are zero, and a layer of n blocks keeps a share proportional to n ** -0.5, so that small layers
stay denser, as with learned masks. The parameters of batch normalizations are random, so that empty channels are constants
other than zero, as in trained networks. For every case the forms of one network take turns in one process, on one thread and one
sample. The time of a round is the least of its calls, in processor time, so that other programs matter less; the speed-up compares
times of one round.

Forms are the dense network in torch and the compacted one. --forms adds the ONNX file with sparse weights in onnxruntime, the CPU
runtime, and LiteRT if it is installed. Their sizes are those of the weights (torch), of the exported files, and of the packed file
(CPU runtime). A form that fails is left out, with its error in the record.

--run FOLDER ... measures finished runs instead, with their own learned masks.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.models import MODELS

SIDES = {"resnet18": 32, "mobilenetv2": 32, "resnet50": 224, "yolov5m": 320, "bisenetv2": 512}
BLOCKS = ("16x8", "16xNone", "1xNone")  # None: all input channels and the whole kernel
SPARSITIES = (0.7, 0.9, 0.95)
PROFILE = 0.5
CALLS = 5  # of a round


def block_of(text: str) -> tuple[int | None, ...]:
    """``16x8``, or ``16xNone`` for blocks of whole output channels."""
    sizes = tuple(None if size == "None" else int(size) for size in text.split("x"))
    return (*sizes, None, None) if None in sizes else sizes


def build(name: str, block: str, sparsity: float) -> nn.Module:
    """A network with random zero blocks."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 2)
        layers = sp.plan(model, block_of(block), sparsity=0.5).layers
        total = sum(layer.grid.n for layer in layers)
        low, high = 0.0, 1e9
        for _ in range(100):  # the factor that keeps the requested number of blocks
            factor = (low + high) / 2
            kept = sum(layer.grid.n * min(1.0, factor * layer.grid.n**-PROFILE) for layer in layers)
            low, high = (factor, high) if kept < (1 - sparsity) * total else (low, factor)
        for layer in layers:
            owner, attribute = layer.sites[0]
            count = max(1, round(min(1.0, low * layer.grid.n**-PROFILE) * layer.grid.n))
            mask = torch.zeros(layer.grid.n)
            mask[torch.randperm(layer.grid.n)[:count]] = 1
            weight = getattr(model.get_submodule(owner), attribute)
            weight.masked_fill_(layer.grid.expand(mask) == 0, 0)  # not -0.0
    return model


def load(folder: Path) -> tuple[nn.Module, Tensor, str, float, str]:
    """The model of a run, an example, the block, the sparsity and the accuracy."""
    from smartprune.cli.models import load_run

    model, example, receipt, _task, config = load_run(folder, trust=False)
    assert receipt is not None
    result = json.loads((folder / "result.json").read_text())
    return model.eval(), example, str(receipt.block), float(config.sparsity), json.dumps(result.get("metrics", {}))[:200]


def times(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each form in each round. They take turns."""
    out: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for run in calls.values():
            run()
        for _ in range(rounds):
            for name, run in calls.items():
                least = []
                for _ in range(CALLS):
                    start = time.thread_time()
                    run()
                    least.append(1000 * (time.thread_time() - start))
                out[name].append(min(least))
    return out


def weight_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


Form = tuple[Callable[[], Any], int]  # a call, and bytes


def onnx_form(model: nn.Module, block: str, x: Tensor, folder: Path) -> Form:
    import onnxruntime

    path = folder / "net.onnx"
    sp.export_onnx(model, path, x, block=block_of(block), sparse=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed), path.stat().st_size


def runtime_form(model: nn.Module, block: str, x: Tensor, folder: Path) -> Form:
    path = folder / "net.packed.safetensors"
    sp.pack(model, path, block_of(block))
    fast = sp.accelerate(model, example=x, threads=1)
    return lambda: fast(x), path.stat().st_size


def litert_form(model: nn.Module, block: str, x: Tensor, folder: Path) -> Form:
    from ai_edge_litert.interpreter import Interpreter

    path = folder / "net.tflite"
    sp.export_litert(model, path, x)  # type: ignore[attr-defined]
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    inputs = interpreter.get_input_details()[0]
    array = x.numpy() if tuple(inputs["shape"]) == tuple(x.shape) else x.permute(0, 2, 3, 1).contiguous().numpy()
    interpreter.set_tensor(inputs["index"], array)
    return interpreter.invoke, path.stat().st_size


FORMS: dict[str, Callable[[nn.Module, str, Tensor, Path], Form]] = {"ONNX, sparse": onnx_form, "CPU runtime": runtime_form}
if "export_litert" in sp.__all__:
    FORMS["LiteRT"] = litert_form


def row(data: str, sparsity: float, metric: str, method: str, values: Sequence[float]) -> dict[str, Any]:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {
        "model": "networks",
        "data": data,
        "method": method,
        "block": "by row",
        "sparsity": sparsity,
        "protocol": "one thread, one sample",
        "metric": metric,
        "values": list(values),
        "mean": statistics.fmean(values),
        "std": std,
        "n": len(values),
    }


def measure(
    name: str, data: str, block: str, sparsity: float, model: nn.Module, x: Tensor, rounds: int, others: Mapping[str, Any]
) -> list[dict[str, Any]]:
    small = sp.compact(model, x)
    report = sp.compaction(small)
    assert report.macs is not None
    forms: dict[str, Form] = {
        "torch, dense": (lambda: model(x), weight_bytes(model)),
        "torch, compacted": (lambda: small(x), weight_bytes(small)),
    }
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        for form, make in others.items():
            try:
                forms[form] = make(model, block, x, Path(folder))
            except Exception as error:  # a package is missing, or cannot run this network
                failed[form] = f"{type(error).__name__}: {error}"[:300]
        ms = times({form: run for form, (run, _) in forms.items()}, rounds)
    method = f"{name}, {block}"
    shares = {"params left": report.parameters, "MACs left": report.macs}
    rows = [row(data, sparsity, f"{metric}, %", method, [100 * after / before]) for metric, (before, after) in shares.items()]
    for form, (_, size) in forms.items():
        label = f"{method}: {form}"
        rows.append(row(data, sparsity, "ms", label, ms[form]))
        rows.append(row(data, sparsity, "MB", label, [size / 1e6]))
        if form != "torch, dense":
            ratios = [a / b for a, b in zip(ms["torch, dense"], ms[form], strict=True)]
            rows.append(row(data, sparsity, "times faster", label, ratios))
    rows[0]["failed"] = failed
    shown = ", ".join(f"{entry['method'].partition(': ')[2]} {entry['metric']} {entry['mean']:.2f}" for entry in rows)
    print(f"{name} {block} {sparsity}: {shown} {failed or ''}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="finished runs to measure instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", action="store_true", help="other runtimes as well")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    others = FORMS if args.forms else {}
    for folder in args.run:
        model, x, block, sparsity, _ = load(folder)
        rows += measure(type(model).__name__, f"learned, {folder.name}", block, sparsity, model, x, args.rounds, others)
    if not args.run:
        for name in args.models:
            x = torch.randn(1, 3, SIDES[name], SIDES[name])
            for block in args.blocks:
                for sparsity in args.sparsity:
                    model = build(name, block, sparsity)
                    rows += measure(name, "random masks", block, sparsity, model, x, args.rounds, others)
                    write(args, rows)
    write(args, rows)


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    machine = {"device": processor(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
    settings = {**vars(args), "out": None, "run": [path.name for path in args.run]}
    text = json.dumps({"settings": settings, **machine, "rows": rows}, indent=1)
    print(text) if args.out is None else args.out.write_text(text)


def processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
