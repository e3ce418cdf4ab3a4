"""``smartprune plan``, ``report`` and ``verify``: look at a model before and after."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Any

from ..errors import SmartpruneError
from .verb import Verbs, add_verb, arguments, show

if TYPE_CHECKING:
    from torch import nn


def plan_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "plan",
        "show what would be pruned, what would not and why, and whether the budget can be met",
        "  smartprune plan resnet18 --block 16x8 --sparsity 0.95 --input 3x32x32\n"
        "  smartprune plan digits\n"
        "  smartprune plan mypackage.net:build --macs 0.5 --input 3x224x224 --skip 'head.*'\n\n"
        "Exit code 1: the budget cannot be met.",
    )
    parser.add_argument("model", help="a network by name, a task, or MODULE:FUNCTION that returns a torch.nn.Module")
    parser.add_argument("--block", help="block, output x input channels (default: the task's, or 16x8)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--sparsity", type=float, help="share of blocks to remove, in [0, 1)")
    budget.add_argument("--params", type=float, help="share of weights to remove")
    budget.add_argument("--macs", type=float, help="share of multiply-accumulates to remove; needs --input")
    parser.add_argument("--floor", type=float, help="least share of its blocks that each layer keeps")
    parser.add_argument("--include", action="append", metavar="GLOB", default=[], help="prune these layers too")
    parser.add_argument("--skip", action="append", metavar="GLOB", default=[], help="leave these layers alone")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32; makes MACs known")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    from ..budget import macs, params
    from ..plan import plan

    with arguments(args):
        model, block, example = find_model(args.model)
        if args.input:
            example = _sample(args.input)
        if args.macs is not None and example is None:
            raise SmartpruneError("--macs needs the shape of one sample: add --input, such as --input 3x32x32")
        budget = None if args.params is None else params(args.params)
        if args.macs is not None:
            budget = macs(args.macs, example=example)
        found = plan(
            model,
            args.block or block,
            args.sparsity,
            budget,
            floor=args.floor,
            include=args.include,
            skip=args.skip,
            example=example,
        )
    show(args, found)
    return 0 if found.feasible else 1


def find_model(text: str) -> tuple[nn.Module, str, Any]:
    """A model with the block and the example input that go with it (16x8 and None where it has none of its own)."""
    from torch import nn

    from ..models import MODELS
    from ..tasks import TASKS

    if text in TASKS:
        task = TASKS[text]()
        return task.model(task.recipe.model), task.recipe.block, task.example()
    if text in MODELS:
        return MODELS[text](), "16x8", None
    module, colon, function = text.partition(":")
    if not colon:
        raise SmartpruneError(
            f"unknown model {text!r}; there are: {', '.join(MODELS)}; tasks: {', '.join(TASKS)}; "
            "or write MODULE:FUNCTION for your own"
        )
    sys.path.insert(0, "")  # as with `python -m`: modules in the current folder
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SmartpruneError(f"{text}: cannot be imported ({error})") from None
    finally:
        sys.path.remove("")
    try:
        model = build if isinstance(build, nn.Module) else build()
    except Exception as error:  # whatever happens in code that is not ours
        raise SmartpruneError(f"{text}() failed with {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{text} gives a {type(model).__name__}; it should return a torch.nn.Module")
    return model, "16x8", None


def _sample(text: str) -> Any:
    import torch

    try:
        shape = [int(part) for part in text.lower().split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1:
        raise SmartpruneError(f"--input {text} cannot be read; write the shape of one sample, such as 3x32x32")
    return torch.zeros(1, *shape)


def report_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "report",
        "show where the zeros of a model file or a run folder are",
        "  smartprune report runs/mine\n  smartprune report model.safetensors --block 16x8 --map layer3.0.conv1",
    )
    parser.add_argument("path", help="a run folder, a .safetensors file or a torch checkpoint")
    parser.add_argument("--block", help="block, output x input channels (default: the receipt's, or 16x8)")
    parser.add_argument("--map", metavar="LAYER", help="draw the blocks of one layer instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from ..report import report

    found = report(args.path, _block(args))
    if args.map:
        with arguments(args):
            print(found.map(args.map))
    else:
        show(args, found)
    return 0


def verify_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "verify",
        "count the zero blocks of a stored model again, and hold its receipt against them",
        "  smartprune verify runs/mine\n"
        "  smartprune verify model.safetensors --receipt receipt.json\n"
        "  smartprune verify model.safetensors --block 16x8\n\n"
        "Exit code 1: something is not as the receipt says.",
    )
    parser.add_argument("path", help="a run folder, a .safetensors file or a torch checkpoint")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to compare with (default: the run folder's)")
    parser.add_argument("--block", help="block to count in; without it and without a receipt, usual shapes are tried")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    from ..verify import verify

    found = verify(args.path, _block(args), args.receipt)
    show(args, found)
    return 0 if found.ok else 1


def _block(args: argparse.Namespace) -> Any:
    from ..block import Block

    with arguments(args):
        return None if args.block is None else Block.of(args.block)
