"""``smartprune compare``: finished runs side by side, as a table, files, a plot, a record."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SmartpruneError
from ..files import check_folder, write_atomic
from .common import Verbs, add_verb, arguments, check_outputs, files_of_run
from .streams import tell

if TYPE_CHECKING:
    from ..experiments.compare import Comparison
    from ..experiments.compare.chart import Chart


SHARES = {
    "sparsity": "sparsity (share of blocks removed)",
    "macs": "share of MACs removed",
    "cycles": "share of NPU cycles removed",
}


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
        for entry in found.entries:
            check_outputs(outputs, files_of_run(entry.folder))
    print(found)
    if args.csv:
        write_atomic(args.csv, found.csv().encode())
    if args.json:
        write_atomic(args.json, (json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n").encode())
    if args.plot:
        from ..experiments.compare.chart import save_charts

        save_charts(charts(found), args.plot)
    if args.html:
        from ..experiments.compare.page import comparison_page

        write_atomic(args.html, comparison_page(found, charts(found)).encode())
    if args.record:
        from ..experiments.compare.record import write_record

        commands = [*_noted(found, "commands"), _command(args)]
        write_record(Path(args.record), found, args.note, commands, _noted(found, "sources"))
    for path in (args.csv, args.json, args.plot, args.html, args.record):
        if path:
            tell(f"written to {path}")
    return 0


def charts(found: Comparison) -> list[Chart]:
    """A panel per group: the metric in percent over the share removed."""
    from ..experiments.compare.chart import Chart, Point, Series

    out = []
    for (data, model, block, _, metric), rows in found.groups().items():
        for kind, named in SHARES.items():
            of_kind = [row for row in rows if row.entries[0].share[0] == kind]
            if not of_kind:
                continue
            series: dict[str, list[Point]] = {}
            for row in of_kind:
                spread = 100 * statistics.stdev(row.values) if len(row.values) > 1 else None
                point = Point(row.entries[0].share[1], 100 * statistics.fmean(row.values), spread)
                series.setdefault(row.entries[0].method, []).append(point)
            lines = tuple(Series(name, tuple(points)) for name, points in series.items())
            dense = {entry.config["seed"]: entry.dense for row in of_kind for entry in row.entries}
            level = ("dense", 100 * statistics.fmean(dense.values()))
            out.append(Chart(f"{data}, {model}, blocks of {block}", named, f"{metric}, %", lines, level))
    return out


def _noted(found: Comparison, what: str) -> list[str]:
    """What the sweeps that made these runs noted: their commands, or their source."""
    from ..experiments.sweep import noted

    folders = dict.fromkeys(entry.folder.parent for entry in found.entries)
    return list(dict.fromkeys(text for folder in folders for text in noted(folder)[what]))


def _command(args: argparse.Namespace) -> str:
    """The command that was given, less the note."""
    return shlex.join(["smartprune", "compare", *args.runs, "--record", args.record])
