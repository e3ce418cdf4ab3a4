"""``smartprune sweep``: a grid of runs on this machine, a process each, that can be stopped and started at will."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import SmartpruneError
from ..files import check_folder, check_name
from ..training.config import BUDGET_SETTINGS
from .common import Verbs, add_verb, arguments
from .streams import tell
from .train import add_flags, asked, read_settings, stop_signals

if TYPE_CHECKING:
    from ..experiments.sweep import Outcome
    from ..experiments.sweep.grid import Grid

T = TypeVar("T")
OF_THE_GRID = ("method", "sparsity", "seed")


def sweep_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "sweep",
        "train a grid of methods, sparsities and seeds, several runs at once, and compare them",
        "  smartprune sweep --methods smart,gradual --sparsities 0.9,0.95 --seeds 0,1,2 --out runs/sweep\n"
        "  smartprune sweep --task cifar10 --data DIR --methods smart,gradual --seeds 0,1 --jobs 4 --minutes 25\n"
        "  smartprune sweep --methods smart,pdp --set smart.ramp=cubic --search-epochs 20 --out runs/ramp\n"
        "  smartprune sweep --grid grid.json --out runs/grid\n"
        "  smartprune sweep --grid records/paper.json --recorded records --out runs/paper --list\n\n"
        "grid.json is an object, or a list of them, such as\n"
        '  {"label": "small", "methods": ["smart"], "sparsities": [0.9], "seeds": [0, 1], "dense_seed": 0,\n'
        '   "options": {"batch": 64}, "settings": {"smart": {"ramp": "cubic"}}}\n\n'
        "The same command again goes on where it was stopped, by Ctrl-C, SIGTERM or kill -9: what is done is skipped,\n"
        "what was interrupted is resumed. Dense models are trained once per seed, or once for all seeds (dense_seed), and\n"
        "shared. Exit code 1: a run failed, or some are missing because the sweep was stopped or --minutes ran out.",
    )
    parser.add_argument("--task", help="what to train on (default: digits)")
    parser.add_argument("--methods", metavar="LIST", help="methods by name (default: that of --config, or smart)")
    parser.add_argument(
        "--sparsities", metavar="LIST", help="shares of blocks to remove (default: that of --config, or the task's)"
    )
    parser.add_argument("--seeds", metavar="LIST", help="seeds, such as 0,1,2 (default: that of --config, or 0)")
    parser.add_argument("--dense-seed", type=int, metavar="N", help="all seeds start from the dense model of this one")
    parser.add_argument("--label", metavar="WORD", help="a word for the names of these runs, such as short")
    parser.add_argument("--grid", metavar="FILE", help="the grid from a JSON file instead")
    parser.add_argument("--recorded", action="append", metavar="DIR", help="leave out what is in this record, or in those in DIR")
    parser.add_argument("--list", action="store_true", help="run nothing; print the cells: done, recorded or missing")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the sweep; a run folder for each in it")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: CPU cores, or 1 on a GPU)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so long, with checkpoints")
    parser.add_argument("--config", metavar="FILE", help="settings from a config.json; other arguments win over it")
    parser.add_argument("--set", action="append", metavar="METHOD.NAME=VALUE", help="a setting of one method")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="where the task's data lies (default: $SMARTPRUNE_DATA)")
    add_flags(parser, without=OF_THE_GRID)
    parser.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    from ..experiments.sweep import Sweep
    from ..experiments.sweep.grid import expand_grids
    from ..experiments.sweep.progress import SweepProgress
    from ..experiments.sweep.records import list_cells, recorded_cells

    with arguments(args):
        if args.jobs is not None and args.jobs < 1:
            raise SmartpruneError(f"--jobs {args.jobs} should be at least 1")
        if args.minutes is not None and not args.minutes > 0:
            raise SmartpruneError(f"--minutes {args.minutes:g} should be above 0")
        check_folder(args.out)
        check_name(Path(args.out).absolute())  # which the runs are given their dense models by
        cells = expand_grids(_grids(args))
        known = recorded_cells([Path(folder) for folder in args.recorded or ()], cells)
        sweep = Sweep(Path(args.out), [cell for cell in cells if cell.name not in known], args.jobs, args.minutes)
        if not args.list:
            sweep.check()
    if args.list:
        print(list_cells(sweep, cells, known))
        return 0
    progress = SweepProgress()
    if args.recorded:
        progress.message(f"{len(known)} of {len(cells)} cells are recorded already")
    if len(known) == len(cells):
        return 0
    with stop_signals(progress.message) as stop:
        try:
            outcome = sweep.run(progress, stop, shlex.join(["smartprune", *args.words]))
        finally:
            progress.close()
    return _tell(args, outcome, len(sweep.cells))


def _grids(args: argparse.Namespace) -> list[Grid]:
    from ..experiments.sweep.grid import Grid, read_grids

    given = asked(argparse.Namespace(**{**vars(args), **dict.fromkeys((*OF_THE_GRID, "set", "out"))}))
    own = {name: given.pop(name) for name in (*OF_THE_GRID, "settings") if name in given}  # of the configuration file
    settings: dict[str, dict[str, Any]] = {}
    for text in args.set or ():
        method, dot, rest = text.partition(".")
        if not dot or "=" in method:
            raise SmartpruneError(f"--set {text}: a sweep has several methods; write METHOD.NAME=VALUE, such as smart.{text}")
        settings.setdefault(method, {}).update(read_settings("method", method, [rest]))
    if args.grid:
        for name in ("methods", "sparsities", "seeds", "dense_seed", "label"):
            if getattr(args, name) is not None:
                raise SmartpruneError(f"--grid and --{name.replace('_', '-')}: the file has its own; give one of the two")
        return [grid.override(given, settings) for grid in read_grids(Path(args.grid))]
    if args.sparsities is not None:
        for kind in BUDGET_SETTINGS[1:]:
            if getattr(args, kind) is not None:
                raise SmartpruneError(f"--sparsities and --{kind}: give one of the two")
            given.pop(kind, None)  # of the configuration file
    method, special = _method(own)
    methods = (method,) if args.methods is None else _listed("--methods", args.methods, str)
    if special and method in methods:
        settings[method] = {**special, **settings.get(method, {})}
    return [
        Grid(
            label=args.label,
            methods=methods,
            sparsities=(own.get("sparsity"),) if args.sparsities is None else _listed("--sparsities", args.sparsities, float),
            seeds=(own.get("seed", 0),) if args.seeds is None else _listed("--seeds", args.seeds, int),
            dense_seed=args.dense_seed,
            options=given,
            settings=settings,
        )
    ]


def _method(own: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The method of a configuration file, and those of its settings that are not its defaults."""
    from ..training.config import configure, make_method

    found = configure({name: own[name] for name in ("method", "settings") if name in own})
    usual = asdict(make_method(found.method, {}))  # type: ignore[call-overload]
    return found.method, {name: value for name, value in found.settings.items() if value != usual[name]}


def _listed(flag: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    try:
        out = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        out = ()
    if not out:
        raise SmartpruneError(f"{flag} {text or repr(text)}: write a list with commas, such as 0,1,2")
    return out


def _tell(args: argparse.Namespace, outcome: Outcome, cells: int) -> int:
    from ..experiments.compare import compare

    if outcome.done:
        try:
            print(compare([cell.folder(Path(args.out)) for cell in outcome.done]))
        except SmartpruneError as error:  # of a task that is judged elsewhere, say: the runs are done all the same
            tell(f"smartprune: {error}")
    for failure in outcome.failed:
        tell(f"\n{failure.name} failed with exit code {failure.code}; the end of {failure.log}:")
        tell("\n".join(f"  {line}" for line in failure.lines))
    missing = len(outcome.missing)
    failed = cells - len(outcome.done) - missing  # of the runs; a dense model may be among the failures, too
    if outcome.failed or missing:
        parts = [f"{len(outcome.done)} runs done"]
        parts += [f"{failed} failed"] * bool(failed) + [f"{missing} missing"] * bool(missing)
        why = {"stopped": " (stopped)", "time": " (out of time)"}.get(outcome.reason, "")
        tell(f"smartprune: {', '.join(parts)}{why}; the same command goes on from here")
        return 1
    return 0
