"""``smartprune plan``, ``report`` and ``verify``: look at a model before and after."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budgets import budget_fields, budget_names, removal
from ..errors import SmartpruneError, explain_memory_errors
from ..files import check_folder, write_atomic
from ..run_files import CONFIG
from .common import Verbs, add_verb, arguments, check_outputs, files_of_run, show
from .streams import tell

if TYPE_CHECKING:
    from torch import nn

    from ..core.budget import Budget
    from ..hardware.estimate import Estimate
    from ..pruning.plan import Plan


def plan_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "plan",
        "show what would be pruned, what would not and why, and whether the budget can be met",
        "  smartprune plan resnet18 --block 16x8 --sparsity 0.95 --input 3x32x32\n"
        "  smartprune plan digits\n"
        "  smartprune plan timm/resnet50 --input 3x224x224\n"
        "  smartprune plan mypackage.net:build --macs 0.5 --input 3x224x224 --skip 'head.*'\n"
        "  smartprune plan resnet18 --cycles 0.9 --npu edge --input 3x32x32\n\n"
        "Exit code 1: the budget cannot be met.",
    )
    parser.add_argument(
        "model", help="a network by name, a task, timm/NAME, torchvision/NAME, or MODULE:FUNCTION that returns a torch.nn.Module"
    )
    parser.add_argument("--block", help="block, output x input channels (default: the task's, or 16x8)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--sparsity", type=float, help="share of blocks to remove, in [0, 1)")
    budget.add_argument("--params", type=float, help="share of weights to remove")
    budget.add_argument("--macs", type=float, help="share of multiply-accumulates to remove; needs --input")
    budget.add_argument("--cycles", type=float, help="share of the time on an NPU to remove; needs --input")
    budget.add_argument("--budget", metavar="KIND=SHARE", help="any budget, such as params=0.9")
    parser.add_argument("--npu", metavar="NAME", help="small, edge, server, or a .json file of its settings (default: edge)")
    parser.add_argument("--floor", type=float, help="least share of its blocks that each layer keeps")
    parser.add_argument("--include", action="append", metavar="GLOB", default=[], help="prune these layers too")
    parser.add_argument("--skip", action="append", metavar="GLOB", default=[], help="leave these layers alone")
    parser.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x32x32; makes MACs known")
    parser.add_argument("--data", metavar="DIR", help="where the data of a task lies (default: $SMARTPRUNE_DATA)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    from ..core.budget import InfeasibleBudgetError
    from ..pruning.plan import plan

    with arguments(args), explain_memory_errors(f"--input {args.input}" if args.input else args.model):
        model, block, example = find_model(args.model, args.data)
        if args.input:
            example = sample(args.input)
        budget = _budget(args, example)
        more = {"floor": args.floor, "include": args.include, "skip": args.skip, "example": example}
        try:
            found = plan(model, args.block or block, budget=budget, **more)
        except InfeasibleBudgetError as error:
            _show_unmet(args, plan(model, args.block or block, **more), budget, str(error))
            return 1
    show(args, found)
    return 0 if found.feasible else 1


def _budget(args: argparse.Namespace, example: Any) -> Budget | None:
    """The budget of the flags, if there is one."""
    from ..training.config import make_budget, parse_budget

    given = [(name, getattr(args, name)) for name in budget_names() if getattr(args, name, None) is not None]
    if args.budget is not None:
        given = [parse_budget(args.budget)]
    fields = budget_fields(given[0][0]) if given else set()
    if "example" in fields and example is None:
        raise SmartpruneError(f"--{given[0][0]} needs the shape of one sample: add --input, such as --input 3x32x32")
    if args.npu and "npu" not in fields:
        raise SmartpruneError("--npu says whose cycles --cycles counts: add --cycles, such as --cycles 0.9")
    return make_budget(*given[0], example, args.npu or "edge") if given else None


def _show_unmet(args: argparse.Namespace, found: Plan, budget: Budget | None, problem: str) -> None:
    """The plan of a budget for which there is no limit, and why."""
    from ..core.budget import scope

    if budget is None:
        return
    if args.json:
        wanted = {"kind": budget.kind, "share": str(budget.share)}
        print(json.dumps({**found.to_json(), "budget": wanted, "feasible": False, "problem": problem}, indent=2))
    else:
        *lines, _ = str(found).splitlines()  # the last one says that there is no budget
        print("\n".join([*lines, f"budget   {removal(float(budget.share), budget.label, scope(budget))}", f"problem  {problem}"]))


def find_model(text: str, data: str | None = None) -> tuple[nn.Module, str, Any]:
    """A model with the block and the example input that go with it (16x8 and None where it has none of its own); ``data`` is
    where that of a task lies."""
    from ..models import MODELS, build, is_external
    from ..models.named import OTHER_NAMES
    from ..tasks import TASKS
    from ..training.config import make_task

    if text in TASKS:
        task = make_task(text, {"folder": data} if data else {})
        return task.model(task.recipe.model), task.recipe.block, task.example()
    if data:
        raise SmartpruneError(f"--data is that of a task, and {text} is none; there are: {', '.join(TASKS)}")
    if text not in MODELS and not is_external(text):
        raise SmartpruneError(
            f"unknown model {text!r}; there are: {', '.join(MODELS)}; tasks: {', '.join(TASKS)}; or use {OTHER_NAMES}"
        )
    return build(text), "16x8", None


def sample(text: str) -> Any:
    import torch

    try:
        shape = [int(part) for part in text.lower().split("x")]
    except ValueError:
        shape = []
    if not shape or min(shape) < 1:
        raise SmartpruneError(f"--input {text} cannot be read; write the shape of one sample, such as 3x32x32")
    with explain_memory_errors(f"--input {text}"):
        return torch.zeros(1, *shape)


def report_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "report",
        "show where the zeros of a model file or a run folder are",
        "  smartprune report runs/mine\n  smartprune report model.safetensors --block 16x8 --map layer3.0.conv1\n"
        "  smartprune report runs/mine --html mine.html --figures figures\n"
        "  smartprune report runs/mine --npu edge\n"
        "  smartprune report model.safetensors --npu edge --model resnet18 --input 3x32x32",
    )
    parser.add_argument("path", help="a run folder, a .safetensors, packed or .onnx file, or a torch checkpoint")
    parser.add_argument("--block", help="block, output x input channels (default: the receipt's, or 16x8)")
    parser.add_argument("--map", metavar="LAYER", help="draw the blocks of one layer instead")
    parser.add_argument("--html", metavar="FILE", help="write a page that opens in any browser, with all there is to see")
    parser.add_argument("--figures", metavar="DIR", help="write its figures as .svg, and with Pillow as .png")
    parser.add_argument(
        "--npu", metavar="NAME", help="show the cycles on an NPU instead: small, edge, server, or a .json file of its settings"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the network of a file, as in smartprune plan: says which layers are transposed or grouped; for --npu too",
    )
    parser.add_argument("--input", metavar="SHAPE", help="with --npu, the shape of one sample, such as 3x32x32")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    from ..reports import report

    if args.html or args.figures:
        return _write_report(args)
    with arguments(args):
        if args.map and (args.json or args.npu):
            raise SmartpruneError(f"--map draws a layer in place of all else; leave out --{'json' if args.json else 'npu'}")
    if args.npu:
        show(args, _cycles(args))
        return 0
    _no_input(args)
    found = report(args.path, _block(args), model=_network_or_run(args))
    if args.map:
        with arguments(args):
            print(found.map(args.map))
    else:
        show(args, found)
    return 0


def _write_report(args: argparse.Namespace) -> int:
    from ..reports.figures import save_figures, select_layers
    from ..reports.page import render
    from ..reports.view import gather
    from ..training.page import run_cycles

    with arguments(args):
        if args.json or (args.map and not args.figures):
            raise SmartpruneError("--json and --map are for the terminal; with --html leave them out (--map goes with --figures)")
        check_outputs({"--html": args.html}, {"the model": args.path, "the file of --npu": args.npu, **files_of_run(args.path)})
        if args.figures:
            check_folder(args.figures)
    if not args.npu:
        _no_input(args)
    cycles = _cycles(args) if args.npu else run_cycles(args.path) if Path(args.path).is_dir() else None
    view = gather(args.path, _block(args), cycles, _network_or_run(args))
    if args.figures:
        with arguments(args):
            select_layers(view, args.map)
        written, png = save_figures(view, args.figures, args.map)
        tell(f"{len(written)} figures written to {args.figures}")
        if not png:
            tell("for .png files as well, run: pip install 'smartprune[plot]'")
    if args.html:
        write_atomic(args.html, render(view).encode())
        tell(f"written to {args.html}")
    return 0


def _no_input(args: argparse.Namespace) -> None:
    with arguments(args):
        if args.input:
            raise SmartpruneError("--input goes with --npu; leave it out, or add --npu edge")


def _network(args: argparse.Namespace) -> nn.Module | None:
    """The network that --model names, which the weights belong to."""
    with arguments(args):
        return find_model(args.model)[0] if args.model else None


def _network_or_run(args: argparse.Namespace) -> nn.Module | None:
    from ..training.page import run_network

    return run_network(args.path) if args.model is None and Path(args.path).is_dir() else _network(args)


def _cycles(args: argparse.Namespace) -> Estimate:
    from ..hardware.npu import read_npu

    block = _block(args)
    with arguments(args):
        npu = read_npu(args.npu)
        if args.model:
            model, _, example = find_model(args.model)
        elif (Path(args.path) / CONFIG).is_file():
            from ..training.config import load_config, make_task

            config = load_config(Path(args.path) / CONFIG)
            task = make_task(config.task, config.task_settings)
            model, example = task.model(config.model), task.example()
        else:
            raise SmartpruneError(f"--npu needs the network of {args.path}: add --model, such as --model resnet18")
        if args.input:
            example = sample(args.input)
        if example is None:
            raise SmartpruneError("--npu needs the shape of one sample: add --input, such as --input 3x32x32")
    with explain_memory_errors(f"--input {args.input}" if args.input else args.path):
        return npu.estimate(model, example, block, weights=args.path)


def verify_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "verify",
        "count the zero blocks of a stored model again, and hold its receipt against them",
        "  smartprune verify runs/mine\n"
        "  smartprune verify model.safetensors --receipt receipt.json\n"
        "  smartprune verify model.safetensors --block 16x8\n"
        "  smartprune verify model.safetensors --block 16x8 --model mypackage.net:build\n\n"
        "Exit code 1: something is not as the receipt says.",
    )
    parser.add_argument("path", help="a run folder, a .safetensors, packed or .onnx file, or a torch checkpoint")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to compare with (default: the run folder's)")
    parser.add_argument("--block", help="block to count in; without it and without a receipt, usual shapes are tried")
    parser.add_argument(
        "--model", metavar="NAME", help="the network of a file, as in smartprune plan: says which layers are transposed or grouped"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    from ..artifacts.verify import verify

    found = verify(args.path, _block(args), args.receipt, model=_network(args))
    show(args, found)
    return 0 if found.ok else 1


def _block(args: argparse.Namespace) -> Any:
    from ..core.block import Block

    with arguments(args):
        return None if args.block is None else Block.of(args.block)
