"""``smartprune train``: starts, resumes or repeats a run."""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..budgets import budget_label, removal
from ..errors import SmartpruneError
from ..files import check_folder
from .common import NAME_OR_TRUST, Subparsers, add_command, add_trust, argument_errors
from .settings import add_flags, requested_settings
from .signals import stop_signals
from .streams import print_message

if TYPE_CHECKING:
    from ..training.config import Config
    from ..training.result import Result


def add_train(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        "train, search, fine-tune, bake and verify; without arguments, a small run on handwritten digits",
        "  smartprune train                                          about half a minute on a CPU\n"
        "  smartprune train digits --method magnitude --sparsity 0.95 --out runs/mine\n"
        "  smartprune train --set start=1 --set ramp=cubic           settings of the method\n"
        "  smartprune train cifar10 --model resnet18 --data DIR --device cuda --sparsity 0.97\n"
        "  smartprune train --resume --out runs/mine                 continues after Ctrl-C, SIGTERM or kill -9\n"
        "  torchrun --nproc-per-node=2 -m smartprune train ...       uses two processes\n"
        "  smartprune train --config runs/mine/config.json           repeats a run\n\n"
        'Defaults marked "by task" depend on the task: smartprune train cifar10 --settings prints them.\n'
        "Ctrl-C and SIGTERM finish the step, write a checkpoint and exit with code 1. A second signal stops at once.",
    )
    parser.usage = "%(prog)s [TASK] [options]"
    parser.add_argument("task", nargs="?", help="task to train on (default: digits)")
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/TASK-METHOD-BLOCK-SPARSITY-sSEED)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--config", metavar="FILE", help="settings from a config.json; other flags take precedence")
    parser.add_argument("--dense-only", action="store_true", help="train only the dense model, and write dense.safetensors")
    parser.add_argument("--settings", action="store_true", help="print all settings as a config.json, and train nothing")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the method")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="folder of the task's data (default: $SMARTPRUNE_DATA)")
    parser.add_argument("--json", action="store_true", help="print the result and the receipt as JSON")
    add_trust(parser, "--config or the run folder")
    add_flags(parser)
    parser.set_defaults(run=run_train, announce_always=True)


def run_train(args: argparse.Namespace) -> int:
    with argument_errors(args):
        settings = requested_settings(args)
    if args.resume or _restarted_by_torchrun(args):
        return _execute(args, _folder_to_resume(args, settings), config=None)
    from ..training.check import check
    from ..training.config import configure
    from ..training.trust import check_trusted

    with argument_errors(args):
        config = configure({"out": "", **settings})
        if args.settings:
            print(json.dumps(asdict(config), indent=2))
            return 0
        if not args.out:
            config = configure({**asdict(config), "out": str(_first_free(_default_out(config)))})
        check_folder(config.out)
        if args.config:
            check_trusted(config.model, args.config, args.model, args.trust, NAME_OR_TRUST, print_message)
        check(config)
    return _execute(args, Path(config.out), config)


def _restarted_by_torchrun(args: argparse.Namespace) -> bool:
    """Whether torchrun (--max-restarts) restarted this command after a failure, and its run folder exists."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return restarted and bool(args.out) and (Path(args.out) / run_files.CONFIG).exists()


def _execute(args: argparse.Namespace, folder: Path, config: Config | None) -> int:
    """Starts a run with a configuration, or resumes the run in the folder."""
    from ..training import ranks
    from ..training.config import load_config
    from ..training.progress import Progress
    from ..training.train import resume, train, train_dense

    if config is None and (folder / run_files.RESULT).exists():
        print_message(f"smartprune: the run in {folder} is already finished")
        return _print_result(args, folder, resume(folder, trust=args.trust))
    progress = Progress(None if ranks.rank() == 0 else io.StringIO())
    if config is None or not (folder / run_files.CONFIG).exists():  # or the folder holds another run, which is an error
        progress.message(_first_line(config or load_config(folder / run_files.CONFIG), folder, args.dense_only))
    with stop_signals(progress.message) as stop:
        try:
            if args.dense_only:
                dense = train_dense(folder, config, progress, stop, trust=True)
                progress.message(f"smartprune train: the dense model is in {dense}")
                return 0
            result = resume(folder, progress, stop, trust=True) if config is None else train(config, progress, stop)
        finally:
            progress.close()
    return _print_result(args, Path(result.folder), result) if ranks.rank() == 0 else 0


def _first_line(config: Config, folder: Path, dense_only: bool) -> str:
    """What the run does and where its files go."""
    if dense_only:
        return f"smartprune train: {config.model} on {config.task}, the dense model only; folder {folder}"
    kind, share = config.budget_share
    goal = removal(share, budget_label(kind))
    return f"smartprune train: {config.model} on {config.task}, {config.method}, blocks of {config.block}, {goal}; folder {folder}"


def _default_out(config: Config) -> Path:
    from ..experiments.sweep.grid import safe_name
    from ..training.config import make_task

    default_model = make_task(config.task, config.task_settings).recipe.model
    kind, share = config.budget_share
    budget = f"{kind if kind != 'sparsity' else ''}{share:g}"
    parts = [config.task, *([config.model] if config.model != default_model else []), config.method, config.block, budget]
    return Path("runs") / safe_name("-".join([*parts, f"s{config.seed}"]).replace("*", "all"))


def _numbered(base: Path) -> Iterator[Path]:
    """``base``, ``base-2``, ``base-3`` and so on."""
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def _first_free(base: Path) -> Path:
    return next(path for path in _numbered(base) if not path.exists())


def _last_used(base: Path) -> Path:
    last = base
    for path in _numbered(base):
        if not path.exists():
            break
        last = path
    return last


def _folder_to_resume(args: argparse.Namespace, settings: dict[str, Any]) -> Path:
    """The run folder. Raises if the requested settings differ from the run's settings, or if its code would be run without
    permission."""
    from ..training.config import check_names, configure, load_config
    from ..training.trust import check_trusted

    with argument_errors(args):
        check_names(settings)
        folder = Path(args.out) if args.out else _last_used(_default_out(configure(settings)))
    path = folder / run_files.CONFIG
    if not path.exists():
        raise SmartpruneError(f"{folder} holds no run to resume; start one without --resume, or give its folder as --out")
    config = load_config(path)
    with argument_errors(args):
        for name, value in settings.items():
            stored = getattr(config, name)
            if name != "out" and not _agrees(stored, value) and not _is_automatic(name, value):
                raise SmartpruneError(
                    f"--resume uses the settings in {path}: there {name} is {stored!r}, not {value!r}; "
                    f"remove that setting, or start a new run"
                )
        if not (folder / run_files.RESULT).exists():
            check_trusted(config.model, path, args.model, args.trust, NAME_OR_TRUST, print_message)
    return folder


def _is_automatic(name: str, value: Any) -> bool:
    """Whether the machine determines the setting when a run starts; config.json then stores the result."""
    return value == "auto" or (name, value) == ("threads", 0)


def _agrees(stored: Any, value: Any) -> bool:
    if isinstance(stored, dict):
        return isinstance(value, dict) and {**stored, **value} == stored
    return bool(stored == (tuple(value) if isinstance(value, list) else value))


def _print_result(args: argparse.Namespace, folder: Path, result: Result) -> int:
    from ..artifacts.receipt import Receipt
    from ..training.progress import format_duration

    receipt = Receipt.load(folder / run_files.RECEIPT)
    if args.json:
        print(json.dumps({**asdict(result), "receipt": receipt.to_json()}, indent=2))
        return 0
    stages = ", ".join(f"{stage} {format_duration(seconds)}" for stage, seconds in result.stage_seconds.items())
    print(receipt)
    print(f"dense    test {result.measure} {result.metrics_line('dense')}")
    print(f"pruned   test {result.measure} {result.metrics_line('pruned')}")
    print(f"verified {'yes' if result.verified else 'NO'}")
    for name, description in result.files.items():
        if name != "page":
            print(f"{name:<8} {description}")
    print(f"time     {result.seconds:.0f} s ({stages})")
    print(f"folder   {folder}")
    print(f"page     {folder / run_files.PAGE}, open it in a browser")
    return 0
