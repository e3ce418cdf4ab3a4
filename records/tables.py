"""Fills the tables of README.md, docs/*.md and records/*/README.md from the records.

python records/tables.py                 fills every table
python records/tables.py --check         changes nothing; lists the tables that differ and exits with code 1
python records/tables.py add FILE.json --name NAME --note TEXT [--command TEXT]
                                         makes a record from the output of a benchmark (bench/topk.py, bench/step.py, or any
                                         JSON with rows), with a note on what it does not show

A table stands between <!-- table: NAME --> and <!-- /table -->. After the name, key=glob selects rows:
<!-- table: topk-cpu metric=ratio method=*warm* -->. With show=macs_left the table shows the MACs of the pruned layers that
are left, in place of the metric. A table whose record does not exist reads "not recorded yet".
The tables of paper_tables.py, such as <!-- table: paper-table2 -->, compare the records with the paper.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paper_tables import PAPER_TABLES

from smartprune.errors import SmartpruneError
from smartprune.experiments.compare.markdown import table_lines
from smartprune.experiments.compare.record import MAX_FILE_BYTES, check_rows, load_rows, save_record
from smartprune.files import parse_json, read_limited, write_atomic
from smartprune.run_files import RESULT

ROOT = Path(__file__).resolve().parent.parent
NOT_YET = "not recorded yet"
MARKED = re.compile(r"(<!-- table: ([^\n]+?) -->\n)(.*?)(<!-- /table -->)", re.S)
Row = dict[str, Any]


def pages(root: Path) -> list[Path]:
    """The pages that may hold tables."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "records").glob("*/README.md"))]
    return [path for path in paths if path.exists()]


def fill_page(page: Path, root: Path) -> str:
    """The text of a page with its tables filled from the records."""

    def fill(match: re.Match[str]) -> str:
        name, *rest = shlex.split(match[2])
        if name in PAPER_TABLES:
            return "\n".join([match[1].rstrip("\n"), *PAPER_TABLES[name](root, page), match[4]])
        folder = root / "records" / name
        if not (folder / RESULT).exists():
            return f"{match[1]}{NOT_YET}\n{match[4]}"
        filters = dict(text.split("=", 1) for text in rest if "=" in text)
        if len(filters) < len(rest):
            raise SmartpruneError(f"{page}: {match[1].strip()}: write NAME, then key=glob to select rows or show=macs_left")
        link = "" if page.parent == folder else os.path.relpath(folder, page.parent)
        try:
            return match[1] + "\n".join(table_lines(load_rows(folder), filters, link)) + f"\n{match[4]}"
        except SmartpruneError as error:
            raise SmartpruneError(f"{page}: {match[1].strip()}: {error}") from None

    text = page.read_text(encoding="utf-8")
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise SmartpruneError(f"{page}: a table is not closed; end it with <!-- /table -->")
    return MARKED.sub(fill, text)


def differing(root: Path) -> list[str]:
    """The tables that differ from the records, as ``page: name``."""
    tables = []
    for page in pages(root):
        before, after = (MARKED.findall(text) for text in (page.read_text(encoding="utf-8"), fill_page(page, root)))
        tables += [f"{page.relative_to(root)}: {a[1]}" for a, b in zip(before, after, strict=True) if a != b]
    return tables


def update(root: Path) -> list[Path]:
    """Fills all tables and returns the pages that changed."""
    changed = []
    for page in pages(root):
        text = fill_page(page, root)
        if text != page.read_text(encoding="utf-8"):
            write_atomic(page, text.encode())
            changed.append(page)
    return changed


def topk_rows(data: Row) -> Iterator[Row]:
    """Rows of bench/topk.py: milliseconds, and the ratio to 50 bisections in float64 in the same run."""
    for part in data["results"]:
        common = {
            "model": "-",
            "data": f"{part['N']:,} scores",
            "block": "-",
            "sparsity": round(1 - part["k"] / part["N"], 12),
            "protocol": f"tau {part['tau']:g}",
        }
        for label, timing in part["rows"].items():
            yield one_value(common, label, "ms", timing["ms"], timing["low"], timing["high"], timing["n"])
        for label, timing in part["rows"].items():
            baseline = next((f"bisection 50, {p}" for p in ("forward", "both") if f", {p}" in label), None)
            if baseline is not None and label != baseline:
                row = one_value(common, label, "ratio", timing["ms"] / part["rows"][baseline]["ms"], repeats=timing["n"])
                yield row | {"to": baseline}


def step_rows(data: Row) -> Iterator[Row]:
    """Rows of bench/step.py: steps in milliseconds and as a ratio to a dense step of the same kind, then the parts alone."""
    common = {
        "model": data["model"],
        "data": "random images",
        "block": "x".join(map(str, data["block"])),
        "sparsity": data["sparsity"],
        "protocol": f"batch {data['batch']}",
    }
    for label, step in data["steps"].items():
        yield one_value(common, label, "ms", step["median"], step["low"], step["high"], step["n"])
    for label, step in data["steps"].items():
        row = one_value(common, label, "ratio", step["ratio"], step["ratio_low"], step["ratio_high"], step["n"])
        yield row | {"to": f"{label.split()[0]} dense"}
    for label, kinds in data.get("parts", {}).items():
        for kind, timing in kinds.items():
            if timing is not None:
                alone = common | {"protocol": f"{common['protocol']}, part alone, {kind}"}
                yield one_value(alone, label, "ms", timing["median"], timing["low"], timing["high"], timing["n"])


def one_value(
    common: Row,
    method: str,
    metric: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    repeats: int | None = None,
) -> Row:
    """A row for one median, with its quartiles and the number of measurements behind it."""
    row = {**common, "method": method, "metric": metric, "values": [value], "mean": value, "std": None, "n": 1}
    optional = {"low": low, "high": high, "repeats": repeats}
    return row | {name: number for name, number in optional.items() if number is not None}


FORMS: dict[str, Callable[[Row], Iterator[Row]]] = {"results": topk_rows, "steps": step_rows}


def read_benchmark(data: object, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The output of a benchmark as rows, and its other fields."""
    form = next((key for key in ("rows", *FORMS) if isinstance(data, dict) and key in data), None)
    if form is None or not isinstance(data, dict):
        raise SmartpruneError(f"{where}: has none of rows, {', '.join(FORMS)}; give the output of a benchmark in bench/")
    try:
        rows = data["rows"] if form == "rows" else list(FORMS[form](data))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SmartpruneError(f"{where}: not in the format of the benchmark ({type(error).__name__}: {error})") from None
    check_rows({"rows": rows}, where)
    return {"rows": rows}, {key: value for key, value in data.items() if key not in ("rows", "parts", *FORMS)}


def add(path: Path, name: str, note: str, command: str, root: Path) -> Path:
    """Makes a record from the output of a benchmark and returns its folder."""
    data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path))
    result, settings = read_benchmark(data, str(path))
    machine = {**settings, **(settings["versions"] if isinstance(settings.get("versions"), dict) else {})}
    parts = [f"{key} {machine[key]}" for key in ("device", "threads", "torch", "triton", "python") if machine.get(key)]
    folder = root / "records" / name
    save_record(folder, result, settings, note, [command] * bool(command), [", ".join(parts)])
    return folder


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    verbs = parser.add_subparsers(dest="verb")
    adding = verbs.add_parser("add", help="make a record from the output of a benchmark")
    adding.add_argument("file", type=Path)
    adding.add_argument("--name", required=True)
    adding.add_argument("--note", required=True, help="what the number does not show")
    adding.add_argument("--command", default="", help="the command that wrote the file")
    args = parser.parse_args(argv)
    try:
        if args.verb == "add":
            print(f"recorded in {add(args.file, args.name, args.note, args.command, root).relative_to(root)}")
        if args.check:
            tables = differing(root)
            for table in tables:
                print(f"{table}: differs from the record; run: python records/tables.py", file=sys.stderr)
            return 1 if tables else 0
        for page in update(root):
            print(f"updated {page.relative_to(root)}")
    except SmartpruneError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
