"""``smartprune prune``: prunes a trained network without training it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .budget import add_budget_flags, find_budget
from .common import Subparsers, add_command, add_trust, argument_errors, check_outputs
from .models import find_model, load_stored_weights, read_inputs, training_inputs
from .settings import parse_settings
from .streams import print_message

if TYPE_CHECKING:
    from torch import nn

    from ..tasks.task import Task
    from ..training.progress import Progress

STEPS = "steps"  # the folder in --out that holds intermediate results while the command runs
FILES = (run_files.MODEL, run_files.RECEIPT, run_files.PACKED)


def add_prune(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "prune",
        "prune a trained network without training, with a few hundred inputs",
        "  smartprune prune runs/dense --sparsity 0.5 --out pruned          a run of train --dense-only\n"
        "  smartprune prune resnet18 --weights net.safetensors --task cifar10 --data DIR --sparsity 0.5 --out pruned\n"
        "  smartprune prune timm/resnet50 --weights net.safetensors --calibration images.npy --macs 0.4 --out pruned\n\n"
        "Labels are not used. If the command is interrupted, repeat it: it continues, and the result is the same.",
    )
    parser.add_argument(
        "model", help="the folder of a run, a task, a built-in network, timm/NAME, torchvision/NAME, or MODULE:FUNCTION"
    )
    parser.add_argument("--weights", metavar="FILE", help="the trained weights: any file that verify can read")
    parser.add_argument("--task", metavar="NAME", help="the task whose training data is used (default: the model's)")
    parser.add_argument("--data", metavar="DIR", help="folder of the task's data (default: the run's, or $SMARTPRUNE_DATA)")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--calibration", metavar="FILE", help="inputs in place of a task's, an .npy array")
    parser.add_argument("--samples", type=int, metavar="N", default=512, help="number of inputs to use (default: 512)")
    parser.add_argument("--batch", type=int, metavar="N", default=32, help="inputs in one forward pass (default: 32)")
    parser.add_argument("--block", metavar="SIZE", help="block size, output x input channels (default: the task's, or 16x8)")
    add_budget_flags(parser, "")
    parser.add_argument("--memory", type=float, metavar="GIB", default=4.0, help="memory for the moments of layers (default: 4)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument("--device", metavar="NAME", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", default=0, help="CPU threads (default: PyTorch's)")
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="folder for model.safetensors, receipt.json and the packed file"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_prune, announce_always=True)


def run_prune(args: argparse.Namespace) -> int:
    import torch

    from ..pruning.oneshot.batches import first_sample
    from ..pruning.oneshot.prune import prune
    from ..training.progress import Progress

    out = Path(args.out)
    with argument_errors(args), explain_memory_errors(args.model):
        _check_options(args, out)
        model, block, task = _find(args)
        batches = read_inputs(args.calibration, args.batch) if args.calibration else _task_inputs(args, task, model)
        example = first_sample(batches[0]) if batches else None
        budget = find_budget(args, example, out / run_files.LATENCY)
        if budget is None:
            raise SmartpruneError("no budget given; add one, such as --sparsity 0.5")
    if args.threads:
        torch.set_num_threads(args.threads)
    progress = Progress()
    try:
        with explain_memory_errors(f"--batch {args.batch}"):
            receipt = prune(
                model.to(args.device),
                batches,
                args.block or block,
                budget=budget,
                floor=args.floor,
                include=args.include,
                skip=args.skip,
                samples=args.samples,
                memory=args.memory,
                seed=args.seed,
                folder=out / STEPS,
                progress=_Ticks(progress),
            )
    finally:
        progress.close()
    _write(model.cpu(), receipt, out)
    print(json.dumps(receipt.to_json(), indent=2) if args.json else f"{receipt}\nfolder   {out}")
    return 0


def _check_options(args: argparse.Namespace, out: Path) -> None:
    from ..files import check_name

    for name, least in (("samples", 2), ("batch", 1), ("threads", 0)):
        if getattr(args, name) < least:
            raise SmartpruneError(f"--{name} {getattr(args, name)} must be at least {least}")
    check_name(out)
    if out.is_dir() and any(path.name not in (STEPS, run_files.LATENCY) for path in out.iterdir()):
        raise SmartpruneError(f"--out {out} is not empty; give a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"--out {out} cannot be made ({error.strerror or error}); give another folder") from None
    check_outputs({f"--out {name}": out / name for name in FILES}, {"the weights": args.weights, "the data": args.calibration})
    if args.calibration and args.task:
        raise SmartpruneError("--calibration and --task are both given; give one source of inputs")


def _find(args: argparse.Namespace) -> tuple[nn.Module, str, Task | None]:
    """The trained network, its block size, and the task that has its data, if known."""
    from ..models.named import is_function
    from ..tasks import TASKS
    from ..training.config import load_config, make_task
    from ..training.trust import check_trusted

    folder, settings = Path(args.model), {"folder": str(Path(args.data).absolute())} if args.data else {}
    if folder.is_dir() and (folder / run_files.CONFIG).exists():
        config = load_config(folder / run_files.CONFIG)
        check_trusted(config.model, folder / run_files.CONFIG, trust=args.trust, announce=print_message)
        values = {**config.task_settings, **parse_settings("task", config.task, args.task_set or []), **settings}
        task: Task | None = make_task(config.task, values)
        model, block, weights = make_task(config.task, values).model(config.model), config.block, folder / run_files.DENSE
    else:
        name = args.task or (args.model if args.model in TASKS else None)
        task = None
        if name is not None:
            task = make_task(name, {**parse_settings("task", name, args.task_set or []), **settings})
        model, block, weights = *_network(args, task), None
    if weights := args.weights or weights:
        load_stored_weights(model, weights)
    elif not is_function(args.model):
        raise SmartpruneError(f"{args.model} has random weights; give the trained ones: --weights FILE")
    return model, block, task


def _network(args: argparse.Namespace, task: Task | None) -> tuple[nn.Module, str]:
    """The network with random weights. A task knows how many classes it has."""
    from ..models.named import is_function

    if task is None or is_function(args.model):
        model, block, _ = find_model(args.model)
        return model, block
    return task.model(task.recipe.model if args.model == (args.task or args.model) else args.model), task.recipe.block


def _task_inputs(args: argparse.Namespace, task: Task | None, model: nn.Module) -> list[Any]:
    """Inputs from the training data of a task, in its random order."""
    if task is None:
        raise SmartpruneError("there is no calibration data: add --task NAME, or --calibration FILE.npy")
    return training_inputs(task, model, args.batch, args.seed, -(-args.samples // args.batch))


class _Ticks:
    """Shows the steps of pruning as the stages of a run."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.began = progress, time.monotonic()

    def __call__(self, step: str, done: int, total: int) -> None:
        from ..training.progress import Tick

        seconds = time.monotonic() - self.began
        self.progress(Tick(step, done, total, done, total, None, "", None, None, None, seconds))


def _write(model: nn.Module, receipt: Any, out: Path) -> None:
    from ..artifacts.pack import pack
    from ..training.folder import save_weights

    save_weights(model, out / run_files.MODEL)
    receipt.save(out / run_files.RECEIPT)
    pack(model, out / run_files.PACKED, receipt=receipt)
