"""``smartprune compact``: writes a pruned model without its empty channels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import Subparsers, add_command, add_trust, argument_errors, check_outputs, files_of_run
from .models import find_model, load_run, load_stored_weights, parse_input

BLOCK = "16x8"  # of the mask file next to an ONNX file


def add_compact(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "compact",
        "write a smaller model without its empty channels",
        "  smartprune compact runs/mine\n"
        "  smartprune compact runs/mine --out small.onnx\n"
        "  smartprune compact mypackage.net:build --weights model.safetensors --input 3x224x224 --out small.pt2\n\n"
        "A .pt2 file is a program of torch.export, an .onnx file a graph, and a .tflite file is for LiteRT: they run without the\n"
        "code of the model.\n"
        "A .safetensors file holds the smaller weights alone.",
    )
    parser.add_argument("model", help="a run folder, a built-in network, or MODULE:FUNCTION that returns a torch.nn.Module")
    parser.add_argument(
        "--out", metavar="FILE", help="file to write: .pt2, .onnx, .tflite or .safetensors (default: compact.pt2 in the run folder)"
    )
    parser.add_argument("--weights", metavar="FILE", help="weights to load into the model: any file that verify can read")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32 (default: the task's)")
    parser.add_argument(
        "--multiple",
        type=int,
        default=1,
        metavar="N",
        help="keep some empty channels, for layers of a multiple of N, such as 8 (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_compact)


def run_compact(args: argparse.Namespace) -> int:
    from ..artifacts.compact import compact, compaction

    folder = Path(args.model)
    out = Path(args.out or folder / run_files.COMPACT)
    with argument_errors(args):
        if args.out is None and not folder.is_dir():
            raise SmartpruneError("--out is missing; give the file to write, such as --out small.pt2")
        if args.multiple < 1:
            raise SmartpruneError(f"--multiple {args.multiple} must be a positive number, such as 8 or 16")
        if out.suffix not in WRITERS:
            raise SmartpruneError(f"--out {out} must end in one of: {', '.join(WRITERS)}")
        inputs = {"the file of --weights": args.weights, **files_of_run(folder)}
        check_outputs({"--out": out}, inputs)
        if folder.is_dir():
            model, example = load_run(folder, args.trust)[:2]
        else:
            model, _, example = find_model(args.model)
        if args.input:
            example = parse_input(args.input)
        if example is None:
            raise SmartpruneError("the shape of one sample is unknown; add --input, such as --input 3x32x32")
    if args.weights:
        load_stored_weights(model, args.weights)
    with explain_memory_errors(f"--input {args.input}" if args.input else args.model):
        small = compact(model, example, multiple=args.multiple)
        WRITERS[out.suffix](small, out, example)
    report, size = compaction(small), out.stat().st_size
    if args.json:
        print(json.dumps({"path": str(out), "size": size, **report.to_json()}, indent=2))
    else:
        print(f"{report}\nfile       {out}, {size:,} bytes")
    return 0


def _write_program(model: Any, out: Path, example: Any) -> None:
    from ..artifacts.compact_files import program_bytes
    from ..files import write_atomic

    write_atomic(out, program_bytes(model, example))


def _write_onnx(model: Any, out: Path, example: Any) -> None:
    from ..artifacts.onnx_export import export_onnx

    export_onnx(model, out, example, BLOCK)


def _write_litert(model: Any, out: Path, example: Any) -> None:
    from ..artifacts.litert import export_litert

    export_litert(model, out, example)


def _write_weights(model: Any, out: Path, example: Any) -> None:
    from ..artifacts.safetensors_file import safetensors_bytes
    from ..files import write_atomic

    write_atomic(out, b"".join(safetensors_bytes(model.state_dict())))


WRITERS: dict[str, Callable[[Any, Path, Any], None]] = {
    ".pt2": _write_program,
    ".onnx": _write_onnx,
    ".tflite": _write_litert,
    ".safetensors": _write_weights,
}
