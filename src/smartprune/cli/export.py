"""``smartprune export``: a pruned model as ONNX, checked."""

from __future__ import annotations

import argparse
import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import Verbs, add_verb, arguments, check_outputs, files_of_run, show
from .inspect import find_model, sample

if TYPE_CHECKING:
    from torch import nn

    from ..tasks.task import Task
    from ..training.config import Config

BATCHES, SAMPLES = 8, 32  # of the training data, for the range of activations


def export_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "export",
        "write a model as ONNX, run it, compare it, and count its zero blocks",
        "  smartprune export runs/mine\n"
        "  smartprune export runs/mine --int8 --out small.onnx\n"
        "  smartprune export mypackage.net:build --weights model.safetensors --input 3x224x224 --block 16x8 --out model.onnx\n\n"
        "A mask of the zero blocks is written beside it (docs/format.md). Needs: pip install 'smartprune[onnx]'",
    )
    parser.add_argument("model", help="a run folder, a network by name, or MODULE:FUNCTION that returns a torch.nn.Module")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: model.onnx in the run folder)")
    parser.add_argument("--weights", metavar="FILE", help="weights to load into the model: any file that verify reads")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32 (default: the task's)")
    parser.add_argument("--block", help="block to check, output x input channels (default: the receipt's)")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to put into the file (default: the run folder's)")
    parser.add_argument("--int8", action="store_true", help="quantize weights and activations to 8 bit")
    parser.add_argument("--calibration", metavar="FILE", help="inputs for --int8, an .npy array (default: the run's training data)")
    parser.add_argument("--no-fold", action="store_true", help="leave batch normalization as it is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_export)


def run_export(args: argparse.Namespace) -> int:
    from ..artifacts.onnx_export import SIDECAR, export_onnx
    from ..artifacts.receipt import Receipt
    from ..core.block import Block

    folder = Path(args.model)
    out = Path(args.out or folder / run_files.ONNX)
    with arguments(args):
        block = None if args.block is None else Block.of(args.block)
        if args.out is None and not folder.is_dir():
            raise SmartpruneError("--out is missing: the file to write, such as --out model.onnx")
        if out.suffix != ".onnx":
            raise SmartpruneError(f"--out {out} must end in .onnx, or nothing will know what it is")
        read = {"the receipt": args.receipt, "the file of --weights": args.weights, "the file of --calibration": args.calibration}
        check_outputs({"--out": out, "the mask beside --out": out.with_suffix(SIDECAR)}, {**read, **files_of_run(folder)})
        if args.calibration and not args.int8:
            raise SmartpruneError("--calibration is for --int8")
        if folder.is_dir():
            model, example, receipt, task, config = from_run(folder)
        else:
            model, _, example = find_model(args.model)
            receipt, task, config = None, None, None
        if args.input:
            example = sample(args.input)
        if example is None:
            raise SmartpruneError("the shape of one sample is not known: add --input, such as --input 3x32x32")
        if block is None and args.receipt is None and receipt is None:
            raise SmartpruneError("there is no receipt that says which block to check: add --block, such as --block 16x8")
        if args.int8 and args.calibration is None and task is None:
            raise SmartpruneError("--int8 needs inputs for the range of activations: add --calibration FILE.npy")
    if args.weights:
        load_weights(model, args.weights)
    batches = None
    if args.int8:
        batches = _array(args.calibration) if args.calibration else training_inputs(task, model, config)  # type: ignore[arg-type]
    with explain_memory_errors(f"--input {args.input}" if args.input else args.model):
        found = export_onnx(
            model,
            out,
            example,
            block,
            receipt=Receipt.load(args.receipt) if args.receipt else receipt,
            int8=args.int8,
            calibration=batches,
            fold=not args.no_fold,
        )
    show(args, found)
    return 0


def from_run(folder: Path) -> tuple[nn.Module, Any, Any, Task, Config]:
    from ..artifacts.receipt import Receipt
    from ..training.config import load_config, make_task

    for name in (run_files.CONFIG, run_files.MODEL):
        if not (folder / name).is_file():
            raise SmartpruneError(f"{folder} has no {name}; give the folder of a finished run")
    config = load_config(folder / run_files.CONFIG)
    task = make_task(config.task, config.task_settings)
    model = task.model(config.model)
    load_weights(model, folder / run_files.MODEL)
    receipt = folder / run_files.RECEIPT
    return model, task.example(), Receipt.load(receipt) if os.path.lexists(receipt) else None, task, config


def load_weights(model: nn.Module, path: str | Path) -> None:
    from ..artifacts.pack import load_into
    from ..artifacts.source import read_source

    source = read_source(path)
    same = source.tensors.keys() == model.state_dict().keys()  # a model may have a part of its own that is called module
    load_into(model, source.tensors if same else source.unwrapped, str(path))


def _array(path: str) -> list[Any]:
    import numpy as np
    import torch

    try:
        values = torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise SmartpruneError(f"--calibration {path} cannot be read as an .npy array ({error})") from None
    if values.dim() < 2 or len(values) == 0:
        raise SmartpruneError(f"--calibration {path} has the shape {list(values.shape)}; its first axis should count samples")
    return list((values if values.dtype != torch.float64 else values.float()).split(SAMPLES))


class _Taken(Exception):  # noqa: N818 (no error: it ends a forward pass whose input is known)
    pass


def training_inputs(task: Task, model: nn.Module, config: Config) -> list[Any]:
    """What the model is given in its first batches of training. Only the task knows what a batch is, so the model itself
    takes note of its inputs."""
    import torch

    seen: list[Any] = []

    def take(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs)
        raise _Taken

    data = task.data("train", torch.device("cpu"))
    hook = model.register_forward_pre_hook(take)
    try:
        for batch in islice(data.batches(min(SAMPLES, config.batch), config.seed, 0), BATCHES):
            try:
                task.loss(model, batch)
            except _Taken:
                continue
    finally:
        hook.remove()
    return seen
