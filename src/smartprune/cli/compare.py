"""``smartprune compare``: finished runs side by side, as a table, files, a plot, a record."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SmartpruneError
from ..files import check_folder, write_atomic
from .common import Verbs, add_verb, arguments, check_outputs, files_of_run
from .streams import tell

if TYPE_CHECKING:
    from ..experiments.compare import Comparison


def compare_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "compare",
        "show finished runs side by side: method by sparsity, mean, standard deviation and n",
        "  smartprune compare runs/sweep\n"
        "  smartprune compare 'runs/digits-*' --csv runs.csv --plot accuracy.svg\n"
        "  smartprune compare runs/sweep --record records/digits-methods --note 'one small network'\n\n"
        "Unfinished or damaged folders are named with the reason. Exit code 1: nothing to compare.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, folders that hold some, or globs of them")
    parser.add_argument("--csv", metavar="FILE", help="write one line per run")
    parser.add_argument("--plot", metavar="FILE", help="draw the metric over sparsity: .svg, or .png with matplotlib")
    parser.add_argument("--html", metavar="FILE", help="write a page with the plot and the tables")
    parser.add_argument("--json", metavar="FILE", help="write the rows with their values, means and deviations")
    parser.add_argument("--record", metavar="DIR", help="write a record: result.json, config.json, README.md")
    parser.add_argument("--note", metavar="TEXT", help="what the record does not show; needed with --record")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    from ..experiments.compare import compare

    with arguments(args):
        if args.record and not (args.note or "").strip():
            raise SmartpruneError("--record needs --note: what does the number not show?")
        if args.note and not args.record:
            raise SmartpruneError("--note belongs to --record; give both")
        if args.plot and Path(args.plot).suffix.lower() not in (".svg", ".png"):
            raise SmartpruneError(f"--plot {args.plot}: name a file that ends in .svg or .png")
        if args.record:
            check_folder(args.record)
    found = compare(args.runs)
    with arguments(args):
        outputs = {f"--{name}": getattr(args, name) for name in ("csv", "plot", "html", "json")}
        for run in found.runs:
            check_outputs(outputs, files_of_run(run.folder))
    print(found)
    if args.csv:
        write_atomic(args.csv, found.csv().encode())
    if args.json:
        write_atomic(args.json, (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode())
    if args.plot:
        from ..experiments.compare.chart import save_charts
        from ..experiments.compare.panels import comparison_charts

        save_charts(comparison_charts(found), args.plot)
    if args.html:
        from ..experiments.compare.page import comparison_page
        from ..experiments.compare.panels import comparison_charts

        write_atomic(args.html, comparison_page(found, comparison_charts(found)).encode())
    if args.record:
        from ..experiments.compare.record import write_record

        commands = [*_noted(found, "commands"), _command(args)]
        write_record(Path(args.record), found, args.note, commands, _noted(found, "sources"))
    for path in (args.csv, args.json, args.plot, args.html, args.record):
        if path:
            tell(f"written to {path}")
    return 0


def _noted(found: Comparison, what: str) -> list[str]:
    """What the sweeps that made these runs noted: their commands, or their source."""
    from ..experiments.sweep.history import read_history

    folders = dict.fromkeys(run.folder.parent for run in found.runs)
    return list(dict.fromkeys(text for folder in folders for text in read_history(folder)[what]))


def _command(args: argparse.Namespace) -> str:
    """The command that was given, less the note."""
    return shlex.join(["smartprune", "compare", *args.runs, "--record", args.record])
