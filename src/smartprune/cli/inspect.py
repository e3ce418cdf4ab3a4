"""``smartprune plan``, ``report`` and ``verify``: inspect a model before and after pruning."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budgets import removal
from ..errors import SmartpruneError, explain_memory_errors
from ..files import check_folder, write_atomic
from ..run_files import CONFIG
from .budget import add_budget_flags, find_budget
from .common import (
    NAME_OR_TRUST,
    Subparsers,
    add_command,
    add_trust,
    argument_errors,
    check_outputs,
    files_of_run,
    print_result,
)
from .models import find_model, parse_input
from .streams import print_message

if TYPE_CHECKING:
    from torch import nn

    from ..core.budget import Budget
    from ..hardware.estimate import Estimate
    from ..hardware.npu import NPU
    from ..pruning.plan import Plan


def add_plan(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "plan",
        "show what would be pruned, what would not and why, and what speed and size a budget gives",
        "  smartprune plan resnet18 --block 16x8 --sparsity 0.95 --input 3x32x32\n"
        "  smartprune plan digits\n"
        "  smartprune plan timm/resnet50 --input 3x224x224\n"
        "  smartprune plan mypackage.net:build --macs 0.5 --input 3x224x224 --skip 'head.*'\n"
        "  smartprune plan resnet18 --cycles 0.9 --npu edge --input 3x32x32\n\n"
        "Exit code 1: the budget cannot be met.",
    )
    parser.add_argument(
        "model", help="a built-in network, a task, timm/NAME, torchvision/NAME, or MODULE:FUNCTION that returns a torch.nn.Module"
    )
    parser.add_argument("--block", metavar="SIZE", help="block size, output x input channels (default: the task's, or 16x8)")
    add_budget_flags(parser, "; needs --input")
    parser.add_argument("--measure", action="store_true", help="time the expected model on this CPU, which takes a few seconds")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32; needed to count MACs")
    parser.add_argument("--data", metavar="DIR", help="folder of a task's data (default: $SMARTPRUNE_DATA)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    from ..core.budget import InfeasibleBudgetError
    from ..pruning.plan import plan

    with argument_errors(args), explain_memory_errors(f"--input {args.input}" if args.input else args.model):
        model, block, example = find_model(args.model, args.data)
        if args.input:
            example = parse_input(args.input)
        budget = find_budget(args, example)
        options = {"floor": args.floor, "include": args.include, "skip": args.skip, "example": example}
        if args.measure and (budget is None or example is None):
            raise SmartpruneError("--measure times the model at a budget: add a budget such as --sparsity 0.8, and --input SHAPE")
        try:
            result = plan(model, args.block or block, budget=budget, npu=_npu(args), measure=args.measure, **options)
        except InfeasibleBudgetError as error:
            _print_infeasible(args, plan(model, args.block or block, **options), budget, str(error))
            return 1
    print_result(args, result)
    return 0 if result.feasible else 1


def _npu(args: argparse.Namespace) -> NPU | None:
    from ..hardware.npu import read_npu

    return read_npu(args.npu) if args.npu else None


def _print_infeasible(args: argparse.Namespace, result: Plan, budget: Budget | None, problem: str) -> None:
    """The plan without a budget, and why the budget cannot be met."""
    from ..core.budget import scope

    if budget is None:
        return
    if args.json:
        requested = {"kind": budget.kind, "share": str(budget.share)}
        print(json.dumps({**result.to_json(), "budget": requested, "feasible": False, "problem": problem}, indent=2))
    else:
        *lines, _ = str(result).splitlines()  # the last line says that there is no budget
        print("\n".join([*lines, f"budget   {removal(float(budget.share), budget.label, scope(budget))}", f"problem  {problem}"]))


def add_report(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "report",
        "show where the zero blocks of a stored model are",
        "  smartprune report runs/mine\n  smartprune report model.safetensors --block 16x8 --map layer3.0.conv1\n"
        "  smartprune report model.pt --receipt receipt.json --html model.html\n"
        "  smartprune report runs/mine --html mine.html --figures figures\n"
        "  smartprune report runs/mine --npu edge\n"
        "  smartprune report model.safetensors --npu edge --model resnet18 --input 3x32x32",
    )
    parser.add_argument("path", help="a run folder, a .safetensors, packed, .onnx or .tflite file, or a torch checkpoint")
    parser.add_argument(
        "--receipt",
        metavar="FILE",
        help="receipt of the weights (default: from the run folder or the file, or receipt.json beside it)",
    )
    parser.add_argument("--block", metavar="SIZE", help="block size, output x input channels (default: the receipt's, or 16x8)")
    parser.add_argument("--map", metavar="LAYER", help="draw the blocks of one layer instead of the table")
    parser.add_argument("--html", metavar="FILE", help="write a complete report as an HTML page")
    parser.add_argument("--figures", metavar="DIR", help="write the figures as .svg and, with Pillow, as .png")
    parser.add_argument(
        "--npu", metavar="NAME", help="show the cycles on an NPU instead: small, edge, server, or a .json file with its settings"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the network of a file, as for smartprune plan: gives transposed and grouped layers; needed for --npu",
    )
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample for --npu, such as 3x32x32")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from ..reports import report

    if args.html or args.figures:
        return _write_report(args)
    with argument_errors(args):
        if args.map and (args.json or args.npu):
            raise SmartpruneError(f"--map prints only a drawing of one layer; remove --{'json' if args.json else 'npu'}")
    if args.npu:
        print_result(args, _cycles(args))
        return 0
    _no_input(args)
    result = report(args.path, _block(args), model=_network_or_run(args), receipt=args.receipt)
    if args.map:
        with argument_errors(args):
            print(result.map(args.map))
    else:
        print_result(args, result)
    return 0


def _write_report(args: argparse.Namespace) -> int:
    from ..reports.figures import save_figures, select_layers
    from ..reports.page import render
    from ..reports.stored import find_receipt
    from ..reports.view import gather
    from ..training.page import run_cycles

    with argument_errors(args):
        if args.json or (args.map and not args.figures):
            raise SmartpruneError("--html and --figures write files: remove --json, and use --map only with --figures")
        inputs = {"the model": args.path, "the receipt": args.receipt or find_receipt(args.path), "the file of --npu": args.npu}
        check_outputs({"--html": args.html}, {**inputs, **files_of_run(args.path)})
        if args.figures:
            check_folder(args.figures)
    if not args.npu:
        _no_input(args)
    cycles = _cycles(args) if args.npu else run_cycles(args.path) if Path(args.path).is_dir() else None
    view = gather(args.path, _block(args), cycles, _network_or_run(args), args.receipt)
    if args.figures:
        with argument_errors(args):
            select_layers(view, args.map)
        written, png = save_figures(view, args.figures, args.map)
        print_message(f"{len(written)} figures written to {args.figures}")
        if not png:
            print_message("to get .png files too, run: pip install pillow matplotlib")
    if args.html:
        write_atomic(args.html, render(view).encode())
        print_message(f"written to {args.html}")
    return 0


def _no_input(args: argparse.Namespace) -> None:
    with argument_errors(args):
        if args.input:
            raise SmartpruneError("--input is only used with --npu; remove it, or add --npu edge")


def _network(args: argparse.Namespace) -> nn.Module | None:
    """The network of --model, if it is given."""
    with argument_errors(args):
        return find_model(args.model)[0] if args.model else None


def _network_or_run(args: argparse.Namespace) -> nn.Module | None:
    from ..training.page import run_network

    return run_network(args.path) if args.model is None and Path(args.path).is_dir() else _network(args)


def _cycles(args: argparse.Namespace) -> Estimate:
    from ..hardware.npu import read_npu

    block = _block(args)
    with argument_errors(args):
        npu = read_npu(args.npu)
        if args.model:
            model, _, example = find_model(args.model)
        elif (Path(args.path) / CONFIG).is_file():
            from ..training.config import load_config, make_task
            from ..training.trust import check_trusted

            config = load_config(Path(args.path) / CONFIG)
            check_trusted(config.model, Path(args.path) / CONFIG, None, args.trust, NAME_OR_TRUST, print_message)
            task = make_task(config.task, config.task_settings)
            model, example = task.model(config.model), task.example()
        else:
            raise SmartpruneError(f"--npu needs the network of {args.path}: add --model, such as --model resnet18")
        if args.input:
            example = parse_input(args.input)
        if example is None:
            raise SmartpruneError("--npu needs the shape of one sample: add --input, such as --input 3x32x32")
    with explain_memory_errors(f"--input {args.input}" if args.input else args.path):
        return npu.estimate(model, example, block or _receipt_block(args), weights=args.path)


def _receipt_block(args: argparse.Namespace) -> Any:
    """The block of the receipt that is given, or found for these weights."""
    from ..reports.stored import read_stored

    receipt = read_stored(args.path, receipt=args.receipt).receipt
    return None if receipt is None else receipt.block


def add_verify(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "verify",
        "count the zero blocks of a stored model and compare them with its receipt",
        "  smartprune verify runs/mine\n"
        "  smartprune verify model.safetensors --receipt receipt.json\n"
        "  smartprune verify model.safetensors --block 16x8\n"
        "  smartprune verify model.safetensors --block 16x8 --model mypackage.net:build\n\n"
        "Exit code 1: the model does not match its receipt.",
    )
    parser.add_argument("path", help="a run folder, a .safetensors, packed, .onnx or .tflite file, or a torch checkpoint")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to compare with (default: the run folder's)")
    parser.add_argument(
        "--block", metavar="SIZE", help="block size to count; without it and without a receipt, common sizes are tried"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="the network of a file, as for smartprune plan: gives transposed and grouped layers"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    from ..artifacts.verify import verify

    result = verify(args.path, _block(args), args.receipt, model=_network(args))
    print_result(args, result)
    return 0 if result.ok else 1


def _block(args: argparse.Namespace) -> Any:
    from ..core.block import Block

    with argument_errors(args):
        return None if args.block is None else Block.of(args.block)
