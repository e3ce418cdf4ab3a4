"""``smartprune sweep``: trains a grid of runs on this machine, one process per run. It can be stopped and continued."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import SmartpruneError
from ..files import check_folder, check_name
from ..text import shorten
from ..training.config import BUDGET_SETTINGS
from .common import NAME_OR_TRUST, Subparsers, add_command, add_trust, argument_errors
from .settings import add_flags, parse_settings, requested_settings
from .signals import stop_signals
from .streams import print_message

if TYPE_CHECKING:
    from ..experiments.sweep import Outcome
    from ..experiments.sweep.grid import Cell, Grid

T = TypeVar("T")
GRID_SETTINGS = ("method", "sparsity", "seed")
MAX_NAMES = 1000  # characters of the list of runs in an error message


def add_sweep(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "sweep",
        "train a grid of methods, sparsities and seeds, several runs at once, and compare them",
        "  smartprune sweep --methods smart,gradual --sparsities 0.9,0.95 --seeds 0,1,2 --out runs/sweep\n"
        "  smartprune sweep --task cifar10 --data DIR --methods smart,gradual --seeds 0,1 --jobs 4 --minutes 25\n"
        "  smartprune sweep --methods smart,pdp --set smart.ramp=cubic --search-epochs 20 --out runs/ramp\n"
        "  smartprune sweep --grid grid.json --out runs/grid\n"
        "  smartprune sweep --grid grid.json --on ray --cpus 4 --gpus 1 --out /shared/runs/grid\n"
        "  smartprune sweep --grid records/paper.json --recorded records --out runs/paper --list\n\n"
        "grid.json is an object, or a list of them, such as\n"
        '  {"label": "small", "methods": ["smart"], "sparsities": [0.9], "seeds": [0, 1], "dense_seed": 0,\n'
        '   "options": {"batch": 64}, "settings": {"smart": {"ramp": "cubic"}}}\n\n'
        "Repeat the same command to continue after Ctrl-C, SIGTERM or kill -9: finished runs are skipped, interrupted runs\n"
        "are resumed. Runs share dense models, which are trained once per seed, or once for all seeds (dense_seed).\n"
        "Exit code 1: a run failed, or runs are missing because the sweep was stopped or --minutes ran out.",
    )
    parser.usage = "%(prog)s --out DIR [options]"
    parser.add_argument("--task", metavar="NAME", help="task to train on (default: digits)")
    parser.add_argument("--methods", metavar="LIST", help="methods, such as smart,gradual (default: from --config, or smart)")
    parser.add_argument("--sparsities", metavar="LIST", help="shares of blocks to remove (default: from --config, or the task's)")
    parser.add_argument("--seeds", metavar="LIST", help="seeds, such as 0,1,2 (default: from --config, or 0)")
    parser.add_argument("--dense-seed", type=int, metavar="N", help="all seeds start from the dense model of this seed")
    parser.add_argument("--label", metavar="WORD", help="a word in the names of these runs, such as short")
    parser.add_argument("--grid", metavar="FILE", help="read the grid from a JSON file instead")
    parser.add_argument("--recorded", action="append", metavar="DIR", help="skip runs in this record, or in the records in DIR")
    parser.add_argument("--list", action="store_true", help="train nothing; print which runs are done, recorded or missing")
    parser.add_argument("--only", metavar="GLOB", help="run only these runs of the grid: a name, or a pattern such as 'digits-*'")
    parser.add_argument("--slurm", metavar="FILE", help="train nothing; write a script that runs the grid as Slurm arrays")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the sweep, with one run folder per run")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: CPU cores; on a GPU, as many as pay off)")
    parser.add_argument("--mps", action="store_true", help="share a GPU under NVIDIA's Multi-Process Service, which it starts")
    parser.add_argument("--on", choices=("local", "ray"), default="local", help="this machine, or a Ray cluster (default: local)")
    parser.add_argument("--cpus", type=int, metavar="N", help="CPUs of a run on Ray (default: 1)")
    parser.add_argument("--gpus", type=float, metavar="N", help="GPUs of a run on Ray, such as 0.5 (default: 1 for runs on a GPU)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop with checkpoints within this time")
    parser.add_argument("--dense-parts", metavar="DIR", help="keep dense models here too, in fp16 files of less than 16 MiB")
    parser.add_argument("--config", metavar="FILE", help="settings from a config.json; other flags take precedence")
    parser.add_argument("--set", action="append", metavar="METHOD.NAME=VALUE", help="a setting of one method")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="folder of the task's data (default: $SMARTPRUNE_DATA)")
    add_trust(parser, "--config or --grid")
    add_flags(parser, without=GRID_SETTINGS)
    parser.set_defaults(run=run_sweep, announce_always=True)


def run_sweep(args: argparse.Namespace) -> int:
    from ..experiments.sweep import Sweep
    from ..experiments.sweep.grid import expand_grids
    from ..experiments.sweep.mps import MultiProcessService
    from ..experiments.sweep.progress import SweepProgress
    from ..experiments.sweep.records import list_cells, recorded_cells
    from ..experiments.sweep.slurm import without_flags, write_script
    from ..training.trust import check_trusted

    with argument_errors(args):
        if args.jobs is not None and args.jobs < 1:
            raise SmartpruneError(f"--jobs {args.jobs} must be at least 1")
        if args.minutes is not None and not args.minutes > 0:
            raise SmartpruneError(f"--minutes {args.minutes:g} must be above 0")
        if args.on == "ray":
            args.out = str(Path(args.out).absolute())  # workers may start in another folder
        _check_requests(args)
        check_folder(args.out)
        check_name(Path(args.out).absolute())  # part of the path by which the runs load their dense models
        cells = _chosen(expand_grids(_grids(args)), args.only)
        for model in sorted({cell.config.model for cell in cells}):
            check_trusted(model, args.grid or args.config or "sweep", args.model, args.trust, NAME_OR_TRUST, print_message)
        known = recorded_cells([Path(folder) for folder in args.recorded or ()], cells)
        parts = None if args.dense_parts is None else Path(args.dense_parts)
        sweep = Sweep(Path(args.out), [cell for cell in cells if cell.name not in known], args.jobs, args.minutes, parts)
        if not args.list:
            sweep.check()
    if args.list:
        print(list_cells(sweep, cells, known))
        return 0
    if args.slurm:
        missing = [cell for cell in sweep.cells if not sweep.done(cell)]
        write_script(Path(args.slurm), missing, Path(args.out), args.words, sys.executable)
        print(f"{args.slurm}: {len(missing)} runs; submit them with: bash {args.slurm}")
        return 0
    progress = SweepProgress()
    if args.recorded:
        progress.message(f"{len(known)} of {len(cells)} cells are recorded already")
    if len(known) == len(cells):
        return 0
    with ExitStack() as stack:
        if args.on == "ray":
            from ..experiments.sweep.ray_jobs import on_ray

            with argument_errors(args):
                stack.enter_context(on_ray(sweep, args.jobs, args.cpus or 1, args.gpus))
        stop = stack.enter_context(stop_signals(progress.message))
        stack.callback(progress.close)
        if args.mps:
            stack.enter_context(MultiProcessService())
        outcome = sweep.run(progress, stop, shlex.join(["smartprune", *without_flags(args.words, ["--only"])]))
    return _report(args, outcome, len(sweep.cells))


def _check_requests(args: argparse.Namespace) -> None:
    """Checks the flags of runs on Ray."""
    for flag, value in (("--cpus", args.cpus), ("--gpus", args.gpus)):
        if value is not None and args.on != "ray":
            raise SmartpruneError(f"{flag} {value:g} is for runs on Ray; add --on ray, or leave {flag} out")
    for flag in ("slurm", "mps"):
        if getattr(args, flag) and args.on != "local":
            raise SmartpruneError(f"--{flag} and --on {args.on}: give only one of them")
    if args.cpus is not None and args.cpus < 1:
        raise SmartpruneError(f"--cpus {args.cpus} must be at least 1")
    if args.gpus is not None and not 0 <= args.gpus <= 1:
        raise SmartpruneError(f"--gpus {args.gpus:g} must be from 0 to 1, because a run uses one GPU")


def _chosen(cells: list[Cell], pattern: str | None) -> list[Cell]:
    chosen = cells if pattern is None else [cell for cell in cells if fnmatchcase(cell.name, pattern)]
    if not chosen:
        names = shorten(", ".join(cell.name for cell in cells), MAX_NAMES)
        raise SmartpruneError(f"--only {pattern}: no run of the grid matches; its runs are {names}; --list prints all of them")
    return chosen


def _grids(args: argparse.Namespace) -> list[Grid]:
    from ..experiments.sweep.grid import Grid, read_grids

    options = requested_settings(argparse.Namespace(**{**vars(args), **dict.fromkeys((*GRID_SETTINGS, "set", "out"))}))
    from_file = {name: options.pop(name) for name in (*GRID_SETTINGS, "settings") if name in options}
    settings: dict[str, dict[str, Any]] = {}
    for text in args.set or ():
        method, dot, rest = text.partition(".")
        if not dot or "=" in method:
            raise SmartpruneError(f"--set {text}: a sweep has several methods; write METHOD.NAME=VALUE, such as smart.{text}")
        settings.setdefault(method, {}).update(parse_settings("method", method, [rest]))
    if args.grid:
        for name in ("methods", "sparsities", "seeds", "dense_seed", "label"):
            if getattr(args, name) is not None:
                raise SmartpruneError(f"--grid and --{name.replace('_', '-')}: the file sets it too; give only one of them")
        return [grid.override(options, settings) for grid in read_grids(Path(args.grid))]
    if args.sparsities is not None:
        for kind in BUDGET_SETTINGS[1:]:
            if getattr(args, kind) is not None:
                raise SmartpruneError(f"--sparsities and --{kind} both set the budget; give only one of them")
            options.pop(kind, None)  # from the configuration file
    method, changed = _method(from_file)
    methods = (method,) if args.methods is None else _parse_list("--methods", args.methods, str)
    if changed and method in methods:
        settings[method] = {**changed, **settings.get(method, {})}
    sparsities: tuple[float | None, ...] = (from_file.get("sparsity"),)
    if args.sparsities is not None:
        sparsities = _parse_list("--sparsities", args.sparsities, float)
    seeds = (from_file.get("seed", 0),) if args.seeds is None else _parse_list("--seeds", args.seeds, int)
    return [
        Grid(
            label=args.label,
            methods=methods,
            sparsities=sparsities,
            seeds=seeds,
            dense_seed=args.dense_seed,
            options=options,
            settings=settings,
        )
    ]


def _method(values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method of a configuration file, and its settings that differ from the defaults."""
    from ..training.config import configure, make_method

    config = configure({name: values[name] for name in ("method", "settings") if name in values})
    defaults = asdict(make_method(config.method, {}))  # type: ignore[call-overload]
    return config.method, {name: value for name, value in config.settings.items() if value != defaults[name]}


def _parse_list(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        items = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        items = ()
    if not items:
        raise SmartpruneError(f"{flag} {text or repr(text)} must be a list with commas, such as 0,1,2")
    return items


def _report(args: argparse.Namespace, outcome: Outcome, cells: int) -> int:
    from ..experiments.compare import compare

    if outcome.done:
        try:
            print(compare([cell.folder(Path(args.out)) for cell in outcome.done]))
        except SmartpruneError as error:  # for example, detections that are not scored yet; the runs are done nevertheless
            print_message(f"smartprune: {error}")
    for failure in outcome.failed:
        print_message(f"\n{failure.name} failed with exit code {failure.code}; the end of {failure.log}:")
        print_message("\n".join(f"  {line}" for line in failure.lines))
    missing = len(outcome.missing)
    failed = cells - len(outcome.done) - missing  # without dense models, which outcome.failed may list too
    if outcome.failed or missing:
        parts = [f"{len(outcome.done)} runs done"]
        parts += [f"{failed} failed"] * bool(failed) + [f"{missing} missing"] * bool(missing)
        reason = {"stopped": " (stopped)", "time": " (out of time)"}.get(outcome.reason, "")
        print_message(f"smartprune: {', '.join(parts)}{reason}; repeat the same command to continue")
        return 1
    return 0
