"""Tables of the pages, made from the records.

python records/tables.py                 fills every table of README.md, docs/*.md and records/*/README.md
python records/tables.py --check         changes nothing; exit code 1 and the places that differ
python records/tables.py add FILE.json --name NAME --note TEXT [--command TEXT]
                                         records what a benchmark wrote (bench/topk.py, bench/step.py, or any JSON
                                         with rows), with a note on what it does not show

A table stands between <!-- table: NAME --> and <!-- /table -->. Behind the name, key=glob keeps some rows only:
<!-- table: topk-cpu metric=ratio method=*warm* -->. show=macs_left shows these in place of the metric. A record that does not
exist yet reads "not recorded yet".
<!-- table: paper-table2 --> puts every record's cells of the paper's Table 2 beside the paper's numbers.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smartprune.errors import SmartpruneError
from smartprune.experiments.compare.markdown import NOT_YET, table_lines
from smartprune.experiments.compare.record import MAX_FILE_BYTES, RESULT, check_rows, load_rows, save_record
from smartprune.files import parse_json, read_limited, write_atomic

ROOT = Path(__file__).resolve().parent.parent
PAPER = "paper-table2"
LENGTHS = {  # whatever the length of the dense training, whose outcome stands in the table
    "short": re.compile(r"\d+ dense \+ 12 search \+ 48 fine-tuning epochs"),
    "full": re.compile(r"\d+ dense \+ 40 search \+ 160 fine-tuning epochs"),
}
RATE = re.compile(r"search lr ([^,]+)")
MARKED = re.compile(r"(<!-- table: ([^\n]+?) -->\n)(.*?)(<!-- /table -->)", re.S)
Row = dict[str, Any]


def pages(root: Path) -> list[Path]:
    found = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "records").glob("*/README.md"))]
    return [page for page in found if page.exists()]


def filled(page: Path, root: Path) -> str:
    """The text of a page with its tables as the records have them."""

    def fill(match: re.Match[str]) -> str:
        name, *rest = shlex.split(match[2])
        if name == PAPER:
            return "\n".join([match[1].rstrip("\n"), *paper_lines(root, page), match[4]])
        folder = root / "records" / name
        if not (folder / RESULT).exists():
            return f"{match[1]}{NOT_YET}\n{match[4]}"
        only = dict(text.split("=", 1) for text in rest if "=" in text)
        if len(only) < len(rest):
            raise SmartpruneError(f"{page}: {match[1].strip()}: write NAME, key=glob to choose rows, show=macs_left")
        link = "" if page.parent == folder else os.path.relpath(folder, page.parent)
        try:
            return match[1] + "\n".join(table_lines(load_rows(folder), only, link)) + f"\n{match[4]}"
        except SmartpruneError as error:
            raise SmartpruneError(f"{page}: {match[1].strip()}: {error}") from None

    text = page.read_text(encoding="utf-8")
    if text.count("<!-- table:") != len(MARKED.findall(text)):
        raise SmartpruneError(f"{page}: a table is not closed; end it by <!-- /table -->")
    return MARKED.sub(fill, text)


def paper_lines(root: Path, page: Path) -> list[str]:
    """What the records have of the paper's Table 2, a line per cell: its number, ours in a short and in a full run."""
    with (root / "records" / f"{PAPER}.csv").open() as file:
        told = {(r["model"], r["block"], float(r["sparsity"]), r["method"]): r["accuracy"] for r in csv.DictReader(file)}
    cells: dict[tuple[Any, ...], dict[str, list[str]]] = {}
    for folder in sorted(path.parent for path in (root / "records").glob(f"*/{RESULT}")):
        if folder.name.startswith("ablation"):
            continue  # Table 5
        for row in load_rows(folder):
            length = next((name for name, start in LENGTHS.items() if start.match(row["protocol"])), None)
            if length is None or row["data"] != "cifar10" or row["metric"] != "accuracy" or "seeds" not in row:
                continue
            if row["sparsity"] is None:
                continue  # another budget
            rate = RATE.search(row["protocol"])
            if any(word in row["protocol"] for word in ("distill", ", augment ")) or (rate is not None and rate[1] != "0.02"):
                continue  # another protocol
            spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
            value = f"{100 * row['mean']:.2f}{spread} ({100 * row['difference']:+.2f}), n={row['n']}"
            link = os.path.relpath(folder, page.parent)
            place = (row["model"], row["block"], row["sparsity"], row["method"])
            cells.setdefault(place, {}).setdefault(length, []).append(f"[{value}]({link})")
            dense = cells.setdefault((*place[:2], 0.0, "dense"), {}).setdefault(length, [])
            began = f"[{100 * (row['mean'] - row['difference']):.2f}]({link})"
            dense += [began] * (began not in dense)
    order = {place[:3]: number for number, place in enumerate(told)}
    lines = [
        "| network | block | removed | method | paper | ours, short | ours, full |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for place in sorted(cells, key=lambda place: order.get(place[:3], len(order))):
        model, block, share, method = place
        paper = told.get(place, "-")
        shown = paper if paper in ("-", "N/A") else f"{100 * float(paper):.1f}"
        if share and shown != paper:
            shown += f" ({100 * (float(paper) - float(told[(model, block, 0.0, 'dense')])):+.1f})"
        ours = ["; ".join(cells[place].get(length, ["-"])) for length in LENGTHS]
        lines.append(f"| {model} | {block} | {100 * share:g} % | {method} | {shown} | {' | '.join(ours)} |")
    numbers = [place for place, value in told.items() if place[2] > 0 and value != "N/A"]
    found = sum(place in cells for place in numbers)
    text = "Accuracy in % (difference to dense), mean ± standard deviation. "
    text += f"Of the {len(numbers)} numbers in the paper's table, {found} have one of ours beside them."
    return [*lines, "", text]


def differing(root: Path) -> list[str]:
    """The tables that are not what the records say, as ``page: name``."""
    out = []
    for page in pages(root):
        before, after = (MARKED.findall(text) for text in (page.read_text(encoding="utf-8"), filled(page, root)))
        out += [f"{page.relative_to(root)}: {a[1]}" for a, b in zip(before, after, strict=True) if a != b]
    return out


def update(root: Path) -> list[Path]:
    """Fills all tables; the pages that changed."""
    changed = []
    for page in pages(root):
        text = filled(page, root)
        if text != page.read_text(encoding="utf-8"):
            write_atomic(page, text.encode())
            changed.append(page)
    return changed


def topk_rows(data: Row) -> Iterator[Row]:
    """Of bench/topk.py: milliseconds, and the ratio to 50 bisections in float64 in the same run."""
    for part in data["results"]:
        common = {
            "model": "-",
            "data": f"{part['N']:,} scores",
            "block": "-",
            "sparsity": round(1 - part["k"] / part["N"], 12),
            "protocol": f"tau {part['tau']:g}",
        }
        for label, told in part["rows"].items():
            yield one_value(common, label, "ms", told["ms"], told["low"], told["high"], told["n"])
        for label, told in part["rows"].items():
            rival = next((f"bisection 50, {p}" for p in ("forward", "both") if f", {p}" in label), None)
            if rival is not None and label != rival:
                row = one_value(common, label, "ratio", told["ms"] / part["rows"][rival]["ms"], repeats=told["n"])
                yield row | {"to": rival}


def step_rows(data: Row) -> Iterator[Row]:
    """Of bench/step.py: a step over a dense step of its kind, in milliseconds and as a ratio; then the parts alone."""
    common = {
        "model": data["model"],
        "data": "random images",
        "block": "x".join(map(str, data["block"])),
        "sparsity": data["sparsity"],
        "protocol": f"batch {data['batch']}",
    }
    for label, told in data["steps"].items():
        yield one_value(common, label, "ms", told["median"], told["low"], told["high"], told["n"])
    for label, told in data["steps"].items():
        row = one_value(common, label, "ratio", told["ratio"], told["ratio_low"], told["ratio_high"], told["n"])
        yield row | {"to": f"{label.split()[0]} dense"}
    for label, kinds in data.get("parts", {}).items():
        for kind, told in kinds.items():
            if told is not None:
                alone = common | {"protocol": f"{common['protocol']}, part alone, {kind}"}
                yield one_value(alone, label, "ms", told["median"], told["low"], told["high"], told["n"])


def one_value(
    common: Row,
    method: str,
    metric: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    repeats: int | None = None,
) -> Row:
    """A row for a median; what it was taken over is beside it."""
    row = {**common, "method": method, "metric": metric, "values": [value], "mean": value, "std": None, "n": 1}
    more = {"low": low, "high": high, "repeats": repeats}
    return row | {name: extra for name, extra in more.items() if extra is not None}


FORMS: dict[str, Callable[[Row], Iterator[Row]]] = {"results": topk_rows, "steps": step_rows}


def wrapped(data: object, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A benchmark's JSON as rows, and what else it told."""
    form = next((key for key in ("rows", *FORMS) if isinstance(data, dict) and key in data), None)
    if form is None or not isinstance(data, dict):
        raise SmartpruneError(f"{where}: has none of rows, {', '.join(FORMS)}; this is not what a benchmark here writes")
    try:
        rows = data["rows"] if form == "rows" else list(FORMS[form](data))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SmartpruneError(f"{where}: not as the benchmark writes it ({type(error).__name__}: {error})") from None
    check_rows({"rows": rows}, where)
    return {"rows": rows}, {key: value for key, value in data.items() if key not in ("rows", "parts", *FORMS)}


def add(path: Path, name: str, note: str, command: str, root: Path) -> Path:
    data = parse_json(read_limited(path, MAX_FILE_BYTES), str(path))
    result, told = wrapped(data, str(path))
    machine = {**told, **(told["versions"] if isinstance(told.get("versions"), dict) else {})}
    named = [f"{key} {machine[key]}" for key in ("device", "threads", "torch", "triton", "python") if machine.get(key)]
    folder = root / "records" / name
    save_record(folder, result, told, note, [command] * bool(command), [", ".join(named)])
    return folder


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    verbs = parser.add_subparsers(dest="verb")
    adding = verbs.add_parser("add", help="record what a benchmark wrote")
    adding.add_argument("file", type=Path)
    adding.add_argument("--name", required=True)
    adding.add_argument("--note", required=True, help="what the number does not show")
    adding.add_argument("--command", default="", help="the command that wrote the file")
    args = parser.parse_args(argv)
    try:
        if args.verb == "add":
            print(f"recorded in {add(args.file, args.name, args.note, args.command, root).relative_to(root)}")
        if args.check:
            wrong = differing(root)
            for place in wrong:
                print(f"{place}: not what the record says; run: python records/tables.py", file=sys.stderr)
            return 1 if wrong else 0
        for page in update(root):
            print(f"updated {page.relative_to(root)}")
    except SmartpruneError as error:
        print(f"tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
