"""``smartprune bench``: times a pruned model in every installed engine."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from ..training.config import MAX_THREADS
from .common import Subparsers, add_command, add_trust, argument_errors, check_outputs, files_of_run
from .models import SAMPLES, find_model, load_run, load_stored_weights, parse_input, training_inputs
from .streams import print_message

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..experiments.bench.result import Bench


def add_bench(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "bench",
        "time a pruned model in torch, onnxruntime, OpenVINO and smartprune's runtime",
        "  smartprune bench runs/mine\n"
        "  smartprune bench resnet18 --weights model.safetensors --input 3x32x32 --batch 1 8 --plot speed.svg\n\n"
        "Every engine runs in a separate process. Outputs are compared before timing.\n"
        "onnxruntime and OpenVINO are timed if they are installed: pip install onnx onnxscript onnxruntime openvino\n"
        "Exit code 1: no engine could be timed.",
    )
    parser.add_argument("model", help="a run folder, a built-in network, or MODULE:FUNCTION that returns a torch.nn.Module")
    parser.add_argument("--weights", metavar="FILE", help="weights to load into the model: any file that verify can read")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32 (default: the task's)")
    parser.add_argument(
        "--block", metavar="SIZE", help="block size to count, output x input channels (default: the receipt's, or 16x8)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="batch sizes (default: 1 8)")
    parser.add_argument("--threads", type=int, metavar="N", default=1, help="CPU threads of every engine (default: 1)")
    parser.add_argument("--rounds", type=int, metavar="N", default=3, help="rounds of every engine (default: 3)")
    parser.add_argument("--seconds", type=float, metavar="X", default=0.3, help="seconds per round (default: 0.3)")
    parser.add_argument(
        "--engines", nargs="+", default=[], metavar="NAME", help="engines to time, such as torch smartprune (default: all)"
    )
    parser.add_argument("--no-layers", action="store_true", help="time the whole network only, not its layers")
    parser.add_argument("--plot", metavar="FILE", help="draw the times: .svg, or .png with Pillow")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON (default: bench.json in a run folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_bench, announce_always=True)


def run_bench(args: argparse.Namespace) -> int:
    from ..core.block import Block
    from ..experiments.bench.engines import CPU, GPU
    from ..experiments.bench.run import bench

    folder = Path(args.model)
    with argument_errors(args):
        _check_options(args)
        out = args.out or (folder / run_files.BENCH if folder.is_dir() else None)
        protected = {"the file of --weights": args.weights, **files_of_run(folder, but=run_files.BENCH)}
        check_outputs({"--out": out, "--plot": args.plot}, protected)
        model, block, example, inputs, receipt = _find_model(args, folder)
        if args.block is not None:
            Block.of(args.block)
        if args.input:  # replaces the inputs of the task
            example, inputs = parse_input(args.input), []
        if example is None:
            raise SmartpruneError("the shape of one sample is unknown; add --input, such as --input 3x32x32")
        if unknown := set(args.engines) - {*CPU, *GPU}:
            raise SmartpruneError(f"unknown engine --engines {unknown.pop()!r}; choose from: {', '.join((*CPU, *GPU))}")
    if args.weights:
        load_stored_weights(model, args.weights)
    with explain_memory_errors(f"--batch {max(args.batch)}" + (f" with --input {args.input}" if args.input else "")):
        result = bench(
            model,
            inputs[0][:1] if inputs else example,
            name=args.model,
            block=args.block or block,
            batches=sorted(set(args.batch)),
            threads=args.threads,
            rounds=args.rounds,
            seconds=args.seconds,
            layers=not args.no_layers,
            calibration=inputs,
            only=args.engines,
            announce=print_message,
            receipt=None if args.weights else receipt,
        )
    return _write_result(args, result, folder, out)


def _check_options(args: argparse.Namespace) -> None:
    for name in ("threads", "rounds"):
        if getattr(args, name) < 1:
            raise SmartpruneError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.threads > MAX_THREADS:
        raise SmartpruneError(f"--threads {args.threads} must be at most {MAX_THREADS}")
    if min(args.batch) < 1 or not 0 < args.seconds < math.inf:
        raise SmartpruneError("--batch and --seconds must be above 0 and finite")
    if args.plot and Path(args.plot).suffix not in (".svg", ".png"):
        raise SmartpruneError(f"--plot {args.plot} must end in .svg or .png")


def _find_model(args: argparse.Namespace, folder: Path) -> tuple[nn.Module, str, Any, list[Tensor], Any]:
    """The model, its block size, an example input or None, and the training inputs for calibration and the receipt of a run."""
    if folder.is_file():
        raise SmartpruneError(
            f"{folder} is a file; give the name of its network, and the file as --weights {shlex.quote(args.model)} "
            "(packed files work too)"
        )
    if not folder.is_dir():
        model, block, example = find_model(args.model)
        return model, block, example, [], None
    model, example, receipt, task, config = load_run(folder, args.trust)
    block = str(receipt.block) if receipt is not None else config.block
    inputs = training_inputs(task, model, min(SAMPLES, config.batch), config.seed)
    return model, block, example, [arguments[0] for arguments in inputs], receipt


def _write_result(args: argparse.Namespace, result: Bench, folder: Path, out: Path | str | None) -> int:
    """Writes the requested files, prints the result, and returns the exit code."""
    from ..files import write_atomic
    from ..training.page import write_run_page

    data, timed = json.dumps(result.to_json(), indent=2), any(timing.failed is None for timing in result.timings)
    if out is not None and (timed or args.out is not None):
        write_atomic(out, f"{data}\n".encode())
    elif out is not None:
        print_message(f"no engine could be timed, so {out} is not written; add --out FILE to write this result")
    if timed and folder.is_dir() and args.out is None:
        write_run_page(folder, trusted=True)  # the report includes the speed
    if args.plot:
        result.save(args.plot)
    print(data if args.json else result)
    return 0 if timed else 1
