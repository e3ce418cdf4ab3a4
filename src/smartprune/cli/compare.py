"""``smartprune compare``: compares finished runs in a table, files, a plot or a record."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SmartpruneError
from ..files import check_folder, write_atomic
from .common import Subparsers, add_command, argument_errors, check_outputs, files_of_run
from .streams import print_message

if TYPE_CHECKING:
    from ..experiments.compare import Comparison


def add_compare(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "compare",
        "compare finished runs: methods by sparsity, with mean, standard deviation and n",
        "  smartprune compare runs/sweep\n"
        "  smartprune compare 'runs/digits-*' --csv runs.csv --plot accuracy.svg\n"
        "  smartprune compare runs/sweep --record records/digits-methods --note 'one small network'\n\n"
        "Unfinished and damaged runs are listed with the reason. Exit code 1: nothing to compare.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, folders with run folders in them, or globs")
    parser.add_argument("--csv", metavar="FILE", help="write one line per run")
    parser.add_argument("--plot", metavar="FILE", help="plot the metric over sparsity: .svg, or .png with matplotlib")
    parser.add_argument("--html", metavar="FILE", help="write a page with the plot and the tables")
    parser.add_argument("--json", metavar="FILE", help="write the rows with their values, means and deviations")
    parser.add_argument("--record", metavar="DIR", help="write a record: result.json, config.json, README.md")
    parser.add_argument("--note", metavar="TEXT", help="what the record does not show; required with --record")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    from ..experiments.compare import compare

    with argument_errors(args):
        if args.record and not (args.note or "").strip():
            raise SmartpruneError("--record needs --note: say what the numbers do not show")
        if args.note and not args.record:
            raise SmartpruneError("--note is only used with --record; give both")
        if args.plot and Path(args.plot).suffix.lower() not in (".svg", ".png"):
            raise SmartpruneError(f"--plot {args.plot} must end in .svg or .png")
        if args.record:
            check_folder(args.record)
    comparison = compare(args.runs)
    with argument_errors(args):
        outputs = {f"--{name}": getattr(args, name) for name in ("csv", "plot", "html", "json")}
        for run in comparison.runs:
            check_outputs(outputs, files_of_run(run.folder))
    print(comparison)
    if args.csv:
        write_atomic(args.csv, comparison.csv().encode())
    if args.json:
        write_atomic(args.json, (json.dumps(comparison.to_json(), indent=1, allow_nan=False) + "\n").encode())
    if args.plot:
        from ..experiments.compare.chart import save_charts
        from ..experiments.compare.panels import comparison_charts

        save_charts(comparison_charts(comparison), args.plot)
    if args.html:
        from ..experiments.compare.page import comparison_page
        from ..experiments.compare.panels import comparison_charts

        page = comparison_page(comparison, comparison_charts(comparison), _command(args, "html"))
        write_atomic(args.html, page.encode())
    if args.record:
        from ..experiments.compare.record import write_record

        commands = [*_history(comparison, "commands"), _command(args, "record")]
        write_record(Path(args.record), comparison, args.note, commands, _history(comparison, "sources"))
    for path in (args.csv, args.json, args.plot, args.html, args.record):
        if path:
            print_message(f"written to {path}")
    return 0


def _history(comparison: Comparison, key: str) -> list[str]:
    """The ``"commands"`` or the ``"sources"`` (commits) of the sweeps that made these runs."""
    from ..experiments.sweep.history import read_history

    folders = dict.fromkeys(run.folder.parent for run in comparison.runs)
    return list(dict.fromkeys(text for folder in folders for text in read_history(folder)[key]))


def _command(args: argparse.Namespace, output: str) -> str:
    """This command with one of its outputs."""
    return shlex.join(["smartprune", "compare", *args.runs, f"--{output}", getattr(args, output)])
