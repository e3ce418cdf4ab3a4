"""How much of a network can be removed with its empty channels, and how small and fast is it in each runtime?

python bench/compact.py [--models resnet18 ...] [--blocks 16x8 ...] [--sparsity 0.7 0.9 0.95] [--forms] [--out FILE.json [--append]]

Masks are synthetic: random blocks are zero, and a layer of n blocks keeps a share proportional to n ** -0.5, so that small layers
stay denser, as with learned masks. The parameters of batch normalizations are random, so that empty channels are constants
other than zero, as in trained networks. For every case the forms of one network take turns in one process, on one thread and one
sample. The time of a round is the least of its calls, in processor time, so that other programs matter less; the speed-up compares
times of one round.

Forms are the dense network in torch and the compacted one, whose layers keep a multiple of 8 channels. --forms adds files with
dense and with sparse weights and files of the compacted network, in onnxruntime and in LiteRT if it is installed, and the CPU
runtime. Sizes are those of the weights (torch), of the exported files, and of the packed file (CPU runtime). A form that fails is
left out, with its error in the record.

--files FOLDER keeps the files of every case, and reads those that are there. With --prepare nothing is timed, so that the times
can be taken later, when nothing else runs.

--run FOLDER ... measures finished runs instead, with their own learned masks. --trained FOLDER ... takes trained dense networks
(runs of smartprune train --dense-only), removes the blocks with sp.prune, and also measures the accuracy; a task and a network,
such as digits:resnet8, are trained first. The folders must be your own: a config.json may name code to import.

--record NAME --note TEXT writes a record, for example:
    python bench/compact.py --trained digits FOLDER --blocks 16x8 1xNone --sparsity 0.5 0.7 --prepare --record NAME --note TEXT
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import smartprune as sp
from smartprune.models import MODELS
from smartprune.run_files import CONFIG, DENSE
from smartprune.runtime.latency_table import machine_name

SIDES = {"resnet18": 32, "mobilenetv2": 32, "resnet50": 128, "yolov5m": 256, "bisenetv2": 256}
BLOCKS = ("16x8", "16xNone", "1xNone")  # None: all input channels and the whole kernel
SPARSITIES = (0.7, 0.9, 0.95)
PROFILE = 0.5
MULTIPLE = 8  # of the channels of compacted layers, as kernels of onnxruntime need it
CALLS = 3  # of a round
INPUTS, BATCH = 512, 64  # training inputs, without labels, that sp.prune reads
ROOT = Path(__file__).parents[1]


Made = tuple[nn.Module, Tensor, Mapping[str, float]]  # a network with zero blocks, an example, accuracies
Planned = tuple[str, str, str, float, Callable[[], Made]]  # name, data, block, sparsity, and how the network is made


def block_of(text: str) -> tuple[int | None, ...]:
    """``16x8``, or ``16xNone`` for blocks of whole output channels."""
    sizes = tuple(None if size in ("None", "*") else int(size) for size in text.split("x"))
    return (*sizes, None, None) if None in sizes and len(sizes) == 2 else sizes


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


def load(folder: Path) -> tuple[nn.Module, Tensor, str, str, float, dict[str, float]]:
    """The model of a run, an example, the task, the block, the sparsity and the accuracies."""
    from smartprune.cli.models import load_run

    model, example, receipt, _task, config = load_run(folder, trust=False)
    assert receipt is not None
    result = json.loads((folder / "result.json").read_text())
    accuracies = {f"{result['measure']}, %{name}": 100 * result[key] for key, name in (("pruned", ""), ("dense", ", dense"))}
    return model.eval(), example, result["task"], str(receipt.block).removesuffix("x1x1"), float(config.sparsity), accuracies


def trained_cases(source: str, args: argparse.Namespace, folder: Path) -> Iterator[Planned]:
    """A trained network for every block and sparsity, pruned without training."""
    from smartprune.cli.models import load_stored_weights, training_inputs
    from smartprune.tasks import TASKS
    from smartprune.training.config import configure, load_config, make_task
    from smartprune.training.evaluate import evaluate
    from smartprune.training.train import train_dense

    name, _, network = source.partition(":")
    path = folder / f"dense-{source}" if name in TASKS else Path(source)
    if name in TASKS and not (path / DENSE).exists():
        settings = {"task": name, "sparsity": 0.5, "seed": 0, "device": "cpu", "out": str(path)}
        train_dense(path, configure({**settings, **({"model": network} if network else {})}), lambda tick: None, lambda: False)
    config = load_config(path / CONFIG)
    task = make_task(config.task, config.task_settings)
    dense = task.model(config.model)
    load_stored_weights(dense, path / DENSE)
    inputs = training_inputs(task, dense, BATCH, 0, INPUTS // BATCH)
    limited = {"limit": args.images} if "limit" in config.task_settings else {}
    data = make_task(config.task, {**config.task_settings, **limited})

    def accuracy(model: nn.Module) -> float:
        return float(100 * evaluate(data, model, "test", torch.device("cpu")).metrics[task.measure])

    whole = accuracy(dense)
    for block in args.blocks:
        for sparsity in args.sparsity:

            def make(block: str = block, sparsity: float = sparsity) -> Made:
                model = copy.deepcopy(dense)
                sp.prune(model, inputs, block_of(block), sparsity)
                measured = {f"{task.measure}, %": accuracy(model), f"{task.measure}, %, dense": whole}
                return model.eval(), task.example(), measured

            yield f"{config.model.rpartition(':')[2]}, pruned without training", config.task, block, sparsity, make


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


Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One network with zero blocks, its compacted form, an example and its blocks."""

    model: nn.Module
    small: nn.Module
    x: Tensor
    block: tuple[int | None, ...]


def onnx_call(path: Path, case: Case) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: case.x.numpy()}
    return lambda: session.run(None, feed)


def runtime_call(path: Path, case: Case) -> Call:
    fast = sp.accelerate(case.model, example=case.x, threads=1)
    return lambda: fast(case.x)


def litert_call(path: Path, case: Case) -> Call:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], case.x.numpy())
    return interpreter.invoke  # type: ignore[no-any-return]


def write_onnx(path: Path, case: Case) -> None:
    sp.export_onnx(form_of(path, case), path, case.x, block=case.block, sparse="sparse" in path.name)


def write_litert(path: Path, case: Case) -> None:
    sp.export_litert(form_of(path, case), path, case.x, sparse="sparse" in path.name)


def form_of(path: Path, case: Case) -> nn.Module:
    return case.small if "compacted" in path.name else case.model


FORMS: dict[str, tuple[str, Callable[[Path, Case], Any], Callable[[Path, Case], Call]]] = {
    "ONNX, dense": ("dense.onnx", write_onnx, onnx_call),
    "ONNX, sparse": ("sparse.onnx", write_onnx, onnx_call),
    "ONNX, compacted": ("compacted.onnx", write_onnx, onnx_call),
    "LiteRT, dense": ("dense.tflite", write_litert, litert_call),
    "LiteRT, sparse": ("sparse.tflite", write_litert, litert_call),
    "LiteRT, compacted": ("compacted.tflite", write_litert, litert_call),
    "CPU runtime": ("net.packed.safetensors", lambda path, case: sp.pack(case.model, path, case.block), runtime_call),
}  # name: the file, how to write it, how to run it


def prepare(model: nn.Module, x: Tensor, block: str, folder: Path, others: Iterable[str]) -> dict[str, Any]:
    """Writes the files of all forms, the compacted model, and what is known about them; reads them if they are there."""
    path = folder / "case.json"
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    folder.mkdir(parents=True, exist_ok=True)
    small = sp.compact(model, x, multiple=MULTIPLE)
    report = sp.compaction(small)
    case = Case(model, small, x, block_of(block))
    torch.save(small, folder / "small.pt")
    sizes, failed = {"torch, dense": weight_bytes(model), "torch, compacted": weight_bytes(small)}, {}
    for form in others:
        name, write, call = FORMS[form]
        try:
            write(folder / name, case)
            call(folder / name, case)()
            sizes[form] = (folder / name).stat().st_size
        except Exception as error:  # a package is missing, or cannot run this network
            failed[form] = f"{type(error).__name__}: {error}"[:300]
    known = {"parameters": report.parameters, "macs": report.macs, "sizes": sizes, "failed": failed}
    path.write_text(json.dumps(known))
    return known


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


def stored_rows(name: str, data: str, block: str, sparsity: float, known: dict[str, Any]) -> list[dict[str, Any]]:
    """What compaction leaves, and the sizes of all forms."""
    method = f"{name}, {block}"
    shares = {"params left": known["parameters"], "MACs left": known["macs"]}
    rows = [row(data, sparsity, f"{metric}, %", method, [100 * after / before]) for metric, (before, after) in shares.items()]
    rows[0]["failed"] = known["failed"]
    return rows + [row(data, sparsity, "MB", f"{method}: {form}", [size / 1e6]) for form, size in known["sizes"].items()]


def timed_rows(
    name: str, data: str, block: str, sparsity: float, case: Case, rounds: int, folder: Path, forms: Iterable[str]
) -> list[dict[str, Any]]:
    """Milliseconds of all forms, which take turns, and how many times faster they are than a dense form."""
    calls: dict[str, Call] = {"torch, dense": lambda: case.model(case.x), "torch, compacted": lambda: case.small(case.x)}
    calls |= {form: FORMS[form][2](folder / FORMS[form][0], case) for form in forms if form in FORMS}
    ms, rows = times(calls, rounds), []
    for form in calls:
        label = f"{name}, {block}: {form}"
        rows.append(row(data, sparsity, "ms", label, ms[form]))
        same = f"{form.partition(',')[0]}, dense"
        for dense, metric in (("torch, dense", "times faster"), (same, "times faster than dense there")):
            if form != dense and dense in ms:
                ratios = [a / b for a, b in zip(ms[dense], ms[form], strict=True)]
                rows.append(row(data, sparsity, metric, label, ratios))
    return rows


def cases(args: argparse.Namespace, files: Path) -> Iterator[Planned]:
    for folder in args.run:
        model, x, task, block, sparsity, accuracies = load(folder)
        made = model, x, accuracies
        yield f"{type(model).__name__}, learned", task, block, sparsity, lambda made=made: made
    for source in args.trained:
        yield from trained_cases(source, args, files)
    for name in args.models if not args.run and not args.trained else ():
        for block in args.blocks:
            for sparsity in args.sparsity:

                def make(name: str = name, block: str = block, sparsity: float = sparsity) -> Made:
                    return build(name, block, sparsity), torch.randn(1, 3, SIDES[name], SIDES[name]), {}

                yield name, "random masks", block, sparsity, make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="finished runs to measure instead")
    parser.add_argument("--trained", nargs="+", default=[], metavar="FOLDER", help="trained dense runs, or tasks, to prune instead")
    parser.add_argument("--images", type=int, default=2000, help="test images of the accuracies, if the task has more")
    parser.add_argument("--record", metavar="NAME", help="write the record of this name")
    parser.add_argument("--note", default="", help="what the numbers of the record do not show")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="*", choices=list(FORMS), help="other runtimes as well; without names, all of them")
    parser.add_argument("--files", type=Path, help="folder that keeps the files of all cases")
    parser.add_argument("--prepare", action="store_true", help="only write the files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--append", action="store_true", help="keep the rows of FILE and add to them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(args.out.read_text()) if args.append else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    commands = [*before.get("commands", []), command(args)]
    with tempfile.TemporaryDirectory() as temporary:
        files = args.files or Path(temporary)
        for name, data, block, sparsity, make in cases(args, files):
            folder = files / f"{name}-{data.rpartition(' ')[2]}-{block}-{sparsity:g}".replace("*", "all")
            model, x, accuracies = make()
            known = prepare(model, x, block, folder, args.forms or (FORMS if args.forms == [] else ()))
            new = stored_rows(name, data, block, sparsity, known)
            new += [row(data, sparsity, metric, f"{name}, {block}", [value]) for metric, value in accuracies.items()]
            if not args.prepare:
                case = Case(model, torch.load(folder / "small.pt", weights_only=False), x, block_of(block))
                new += timed_rows(name, data, block, sparsity, case, args.rounds, folder, known["sizes"])
            shown = ", ".join(f"{entry['method'].partition(': ')[2]} {entry['metric']} {entry['mean']:.2f}" for entry in new)
            print(f"{name} {block} {sparsity}: {shown} {known['failed'] or ''}", file=sys.stderr, flush=True)
            rows += new
            write(args, rows, commands)
    if args.record:
        save(args, rows, commands)


def command(args: argparse.Namespace) -> str:
    """This command, without the paths of the user and the note."""
    names = {str(path): "FOLDER" for path in (*args.run, *args.trained, args.files) if path and "/" in str(path)}
    words = [names.get(word, word) for word in sys.argv[1:]]
    if "--note" in words:
        del words[words.index("--note") : words.index("--note") + 2]
    return shlex.join(["python", "bench/compact.py", *("FILE.json" if word == str(args.out) else word for word in words)])


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]], commands: Sequence[str]) -> None:
    machine = {"device": machine_name(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
    settings = {"rounds": args.rounds, "calls": CALLS, "sides": SIDES, "profile": PROFILE, "multiple": MULTIPLE}
    text = json.dumps({"settings": settings, **machine, "commands": list(commands), "rows": rows}, indent=1)
    if args.out is not None:
        args.out.write_text(text)
    elif not args.record:
        print(text)


def save(args: argparse.Namespace, rows: Sequence[dict[str, Any]], commands: Sequence[str]) -> None:
    from smartprune.experiments.compare.record import save_record

    for entry in rows:
        entry["protocol"] = "weights and files" if args.prepare else entry["protocol"]
    settings = {"multiple": MULTIPLE, "inputs": INPUTS, "batch": BATCH, "test images, at most": args.images}
    machine = f"{machine_name()}, 1 thread, torch {torch.__version__}, python {platform.python_version()}"
    save_record(ROOT / "records" / args.record, {"rows": rows}, settings, args.note, commands, [machine])


if __name__ == "__main__":
    main()
