"""``smartprune export``: writes a pruned model as ONNX, LiteRT or C and checks it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import Subparsers, add_command, add_trust, argument_errors, check_outputs, files_of_run, print_result
from .models import SAMPLES, find_model, load_run, load_stored_weights, parse_input, read_inputs, training_inputs

ONNX, LITERT, C = ".onnx", ".tflite", ".c"
MASK_SUFFIX, HEADER_SUFFIX = ".mask.json", ".h"
KINDS = {ONNX: "ONNX", LITERT: "LiteRT", C: "C"}


def add_export(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "export",
        "write a model as ONNX, LiteRT or C and compare its outputs",
        "  smartprune export runs/mine\n"
        "  smartprune export runs/mine --int8 --out small.onnx\n"
        "  smartprune export runs/mine --int8 --out small.tflite\n"
        "  smartprune export runs/mine --c --target neon\n"
        "  smartprune export runs/mine --c --target neon_fp16 --fp16\n"
        "  smartprune export runs/mine --int8 --out net.c --target neon_dot\n"
        "  smartprune export mypackage.net:build --weights model.safetensors --input 3x224x224 --block 16x8 --out model.onnx\n\n"
        "With an ONNX file comes one with the mask of the zero blocks (docs/format.md), and with a C file its header.\n"
        "Needs: pip install onnx onnxscript onnxruntime, ai-edge-litert for a .tflite file, and nothing for a .c file",
    )
    parser.add_argument("model", help="a run folder, a built-in network, or MODULE:FUNCTION that returns a torch.nn.Module")
    parser.add_argument("--out", metavar="FILE", help="file to write: .onnx, .tflite or .c (default: model.onnx in the run folder)")
    parser.add_argument("--c", action="store_true", help="write C: model.c in the run folder, or the .c file of --out")
    parser.add_argument("--weights", metavar="FILE", help="weights to load into the model: any file that verify can read")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32 (default: the task's)")
    parser.add_argument("--block", metavar="SIZE", help="block size to check, output x input channels (default: the receipt's)")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to store in the file (default: the run folder's)")
    parser.add_argument("--int8", action="store_true", help="quantize weights and activations to 8 bit")
    parser.add_argument("--fp16", action="store_true", help="weights and activations in float16, in a .c file")
    parser.add_argument("--calibration", metavar="FILE", help="inputs for --int8, an .npy array (default: the run's training data)")
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="store weights as sparse tensors where that makes the file smaller (LiteRT always does)",
    )
    parser.add_argument("--no-fold", action="store_true", help="do not fold batch normalization")
    parser.add_argument("--channels-last", action="store_true", help="images as (height, width, channels) in a .tflite file")
    parser.add_argument("--target", metavar="NAME", help="instruction set of a .c file, such as avx2 or neon (default: portable)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    from ..artifacts.receipt import Receipt
    from ..core.block import Block

    folder = Path(args.model)
    out = Path(args.out or folder / (run_files.C_SOURCE if args.c else run_files.ONNX))
    with argument_errors(args):
        block = None if args.block is None else Block.of(args.block)
        if args.out is None and not folder.is_dir():
            raise SmartpruneError(
                f"--out is missing; give the file to write, such as --out {'model.c' if args.c else 'model.onnx'}"
            )
        if out.suffix not in WRITERS:
            raise SmartpruneError(f"--out {out} must end in one of: {', '.join(WRITERS)}")
        for flag, given, suffix in (
            ("--sparse", args.sparse, ONNX),
            ("--no-fold", args.no_fold, ONNX),
            ("--channels-last", args.channels_last, LITERT),
            ("--c", args.c, C),
            ("--target", args.target, C),
            ("--fp16", args.fp16, C),
        ):
            if given and out.suffix != suffix:
                raise SmartpruneError(
                    f"{flag} is for {KINDS[suffix]} files, and --out is {out}; leave it out, or give --out FILE{suffix}"
                )
        inputs = {"the receipt": args.receipt, "the file of --weights": args.weights, "the file of --calibration": args.calibration}
        outputs = {"--out": out}
        if out.suffix == ONNX:
            outputs["the mask file of --out"] = out.with_suffix(MASK_SUFFIX)
        if out.suffix == C:
            outputs["the header of --out"] = out.with_suffix(HEADER_SUFFIX)
        check_outputs(outputs, {**inputs, **files_of_run(folder)})
        _check_types(args)
        if folder.is_dir():
            model, example, receipt, task, config = load_run(folder, args.trust)
        else:
            _check_network(folder)
            model, _, example = find_model(args.model)
            receipt, task, config = None, None, None
        if args.input:
            example = parse_input(args.input)
        if example is None:
            raise SmartpruneError("the shape of one sample is unknown; add --input, such as --input 3x32x32")
        if block is None and args.receipt is None and receipt is None and out.suffix == ONNX:
            raise SmartpruneError("no receipt gives the block size; add --block, such as --block 16x8")
        if args.int8 and args.calibration is None and task is None:
            raise SmartpruneError("--int8 needs inputs to measure the range of activations; add --calibration FILE.npy")
    if args.weights:
        load_stored_weights(model, args.weights)
    batches = None
    if args.int8:
        if args.calibration:
            batches = read_inputs(args.calibration)
        else:
            batches = training_inputs(task, model, min(SAMPLES, config.batch), config.seed)  # type: ignore[arg-type, union-attr]
    with explain_memory_errors(f"--input {args.input}" if args.input else args.model):
        stored = Receipt.load(args.receipt) if args.receipt else receipt
        result = WRITERS[out.suffix](args, model, out, example, block, receipt=stored, int8=args.int8, calibration=batches)
    print_result(args, result)
    return 0


def _check_network(path: Path) -> None:
    if path.is_file():
        raise SmartpruneError(
            f"{path} is a file, and weights alone do not say what the network computes; give the network, such as "
            f"mypackage.net:build, and --weights {path}"
        )


def _check_types(args: argparse.Namespace) -> None:
    if args.int8 and args.fp16:
        raise SmartpruneError("--int8 and --fp16 exclude each other; give one of them")
    if args.calibration and not args.int8:
        raise SmartpruneError("--calibration is only used with --int8; add --int8 or remove it")


def _write_onnx(args: argparse.Namespace, *what: Any, **settings: Any) -> Any:
    from ..artifacts.onnx_export import export_onnx

    return export_onnx(*what, fold=not args.no_fold, sparse=args.sparse, **settings)


def _write_litert(args: argparse.Namespace, *what: Any, **settings: Any) -> Any:
    from ..artifacts.litert import export_litert

    return export_litert(*what, channels_last=args.channels_last, **settings)


def _write_c(args: argparse.Namespace, model: Any, out: Path, example: Any, block: Any, **settings: Any) -> Any:
    from ..runtime.c_source.export import export_c

    return export_c(model, out, example, target=args.target or "portable", fp16=args.fp16, **settings)


WRITERS: dict[str, Callable[..., Any]] = {ONNX: _write_onnx, LITERT: _write_litert, C: _write_c}
