"""The paper's tables beside the records, and a summary of where SMART is ahead of other methods. Used by tables.py."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from smartprune.experiments.compare.record import load_rows
from smartprune.methods import Smart
from smartprune.run_files import RESULT

LENGTHS = {  # dense training may have any length, because the table shows the dense accuracy
    "short": re.compile(r"\d+ dense \+ 12 search \+ 48 fine-tuning epochs"),
    "full": re.compile(r"\d+ dense \+ 40 search \+ 160 fine-tuning epochs"),
}
RATE = re.compile(r"search lr ([^,]+)")
METHODS = ("smart", "gradual", "pdp", "pas", "awg", "acdc")
LABEL = re.compile(r"smart(?:\((?P<settings>.*)\))?")
METRICS = ("accuracy", "mAP", "mIoU", "accuracy, test", "accuracy, held out")  # in this order, one per comparison
MAX_DETAILS = 60
LEVEL = (
    "Level: the means differ by at most two standard errors of the difference, which two or three seeds estimate poorly. One "
    "seed: one of the two has a single run."
)
Row = dict[str, Any]
Cell = tuple[str, str, float, str]  # model, block, sparsity, method


def read_csv(root: Path, name: str) -> list[dict[str, str]]:
    with (root / "records" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def all_rows(root: Path) -> Iterator[tuple[Path, Row]]:
    """The rows of all records, with the folder of each."""
    for folder in sorted(path.parent for path in (root / "records").glob(f"*/{RESULT}")):
        for row in load_rows(folder):
            yield folder, row


def described(row: Row) -> str:
    """The mean in percent, with n."""
    return f"{100 * row['mean']:.2f} ({row['n']})"


# -- Table 2 ------------------------------------------------------------------------------------------------------------------


def read_table2(root: Path) -> dict[Cell, str]:
    return {(r["model"], r["block"], float(r["sparsity"]), r["method"]): r["accuracy"] for r in read_csv(root, "paper-table2")}


def table2_rows(root: Path) -> Iterator[tuple[Path, Row, str]]:
    """The rows that belong to the paper's Table 2, with their length."""
    for folder, row in all_rows(root):
        length = next((name for name, start in LENGTHS.items() if start.match(row["protocol"])), None)
        if length is not None and not folder.name.startswith("ablation") and in_paper_table(row):  # ablations: Table 5
            yield folder, row, length


def in_paper_table(row: Row) -> bool:
    """Whether the runs of a row have the task, the budget and the protocol of the paper's Table 2."""
    if row["data"] != "cifar10" or row["metric"] != "accuracy" or "seeds" not in row or row["sparsity"] is None:
        return False
    rate = RATE.search(row["protocol"])
    other_protocol = any(setting in row["protocol"] for setting in ("distill", ", augment "))
    return not other_protocol and (rate is None or rate[1] == "0.02")


def paper_lines(root: Path, page: Path) -> list[str]:
    """The recorded cells of Table 2, one line each: the paper's number, ours in a short and in a full run."""
    paper, cells = read_table2(root), recorded_cells(root, page)
    order = {cell[:3]: number for number, cell in enumerate(paper)}
    lines = [
        "| network | block | removed | method | paper | ours, short | ours, full |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for cell in sorted(cells, key=lambda cell: order.get(cell[:3], len(order))):
        model, block, share, method = cell
        accuracy = paper.get(cell, "-")
        shown = accuracy if accuracy in ("-", "N/A") else f"{100 * float(accuracy):.1f}"
        if share and shown != accuracy:
            shown += f" ({100 * (float(accuracy) - float(paper[(model, block, 0.0, 'dense')])):+.1f})"
        ours = ["; ".join(cells[cell].get(length, ["-"])) for length in LENGTHS]
        lines.append(f"| {model} | {block} | {100 * share:g} % | {method} | {shown} | {' | '.join(ours)} |")
    numbers, recorded = counted_table2(root)
    text = "Accuracy in % (difference to dense), mean ± standard deviation. "
    text += f"Of the {numbers} numbers in the paper's table, {recorded} have one of ours beside them."
    return [*lines, "", text]


def recorded_cells(root: Path, page: Path) -> dict[Cell, dict[str, list[str]]]:
    """The recorded accuracies that belong to the paper's Table 2, by cell and length, as links from the page."""
    cells: dict[Cell, dict[str, list[str]]] = {}
    for folder, row, length in table2_rows(root):
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        value = f"{100 * row['mean']:.2f}{spread} ({100 * row['difference']:+.2f}), n={row['n']}"
        link = os.path.relpath(folder, page.parent)
        cell = (row["model"], row["block"], row["sparsity"], row["method"])
        cells.setdefault(cell, {}).setdefault(length, []).append(f"[{value}]({link})")
        dense = cells.setdefault((row["model"], row["block"], 0.0, "dense"), {}).setdefault(length, [])
        dense_value = f"[{100 * (row['mean'] - row['difference']):.2f}]({link})"
        dense += [dense_value] * (dense_value not in dense)
    return cells


def counted_table2(root: Path) -> tuple[int, int]:
    """How many numbers Table 2 has, without the dense ones, and how many of these cells are recorded."""
    recorded = {(row["model"], row["block"], row["sparsity"], row["method"]) for _, row, _ in table2_rows(root)}
    numbers = [cell for cell, accuracy in read_table2(root).items() if cell[2] > 0 and accuracy != "N/A"]
    return len(numbers), sum(cell in recorded for cell in numbers)


def all_cells_lines(root: Path, page: Path) -> list[str]:
    """Every cell of Table 2: the paper's number, then ours with the most seeds."""
    paper = read_table2(root)
    ours: dict[Cell, dict[str, Row]] = {}
    for _, row, length in table2_rows(root):
        best = ours.setdefault((row["model"], row["block"], row["sparsity"], row["method"]), {})
        if length not in best or row["n"] >= best[length]["n"]:
            best[length] = row
    lines = [f"| network | block | removed | {' | '.join(METHODS)} |", f"| --- | --- | ---: |{' ---: |' * len(METHODS)}"]
    for model, block, share in dict.fromkeys(cell[:3] for cell in paper if cell[2] > 0):
        texts = []
        for method in METHODS:
            accuracy = paper.get((model, block, share, method), "-")
            parts = [accuracy if accuracy in ("-", "N/A") else f"{100 * float(accuracy):.1f}"]
            rows = ours.get((model, block, share, method), {})
            parts += [
                described(rows[length]) if length in rows else "-" for length in LENGTHS if length in rows or length == "short"
            ]
            texts.append(" / ".join(parts))
        lines.append(f"| {model} | {block} | {100 * share:g} % | {' | '.join(texts)} |")
    return [
        *lines,
        "",
        "Accuracy in %: the paper's / ours after 12 + 48 epochs (n) / after 40 + 160, where recorded. - is missing.",
    ]


# -- Table 3 ------------------------------------------------------------------------------------------------------------------


def table3_rows(root: Path) -> dict[tuple[str, float, str], Row]:
    """Rows of the data that stand in for ImageNet, COCO and Cityscapes, by network, sparsity and method."""
    wanted = {(r["network"], r["stand_in"], r["metric"]) for r in read_csv(root, "paper-table3")}
    rows: dict[tuple[str, float, str], Row] = {}
    for _, row in all_rows(root):
        if (row["model"], row["data"], row["metric"]) in wanted and row["block"] == "16x8" and "difference" in row:
            key = (row["model"], row["sparsity"], row["method"])
            if key not in rows or row["n"] >= rows[key]["n"]:
                rows[key] = row
    return rows


def table3_lines(root: Path, page: Path) -> list[str]:
    """Every cell of Table 3 as a difference to the dense network, beside ours on other data."""
    paper, ours = read_csv(root, "paper-table3"), table3_rows(root)
    values = {(r["network"], float(r["sparsity"]), r["method"]): float(r["value"]) for r in paper}
    data = {r["network"]: (r["data"], r["stand_in"]) for r in paper}
    lines = [f"| network | data | removed | {' | '.join(METHODS)} |", f"| --- | --- | ---: |{' ---: |' * len(METHODS)}"]
    for network, share in dict.fromkeys(key[:2] for key in values if key[1] > 0):
        texts = []
        for method in METHODS:
            value, row = values.get((network, share, method)), ours.get((network, share, method))
            parts = ["-" if value is None else f"{100 * (value - values[network, 0.0, 'dense']):+.1f}"]
            parts.append("-" if row is None else f"{100 * row['difference']:+.1f} ({row['n']})")
            texts.append(" / ".join(parts))
        lines.append(f"| {network} | {' / '.join(data[network])} | {100 * share:g} % | {' | '.join(texts)} |")
    return [*lines, "", "Difference to the dense network in points: the paper's / ours (n). - is missing."]


def counted_table3(root: Path) -> tuple[int, int]:
    cells = [(r["network"], float(r["sparsity"]), r["method"]) for r in read_csv(root, "paper-table3") if r["method"] != "dense"]
    ours = table3_rows(root)
    return len(cells), sum(cell in ours for cell in cells)


# -- Table 5 ------------------------------------------------------------------------------------------------------------------


def settings_of(method: str) -> dict[str, str] | None:
    """All settings of SMART in the label of a row, such as ``smart(start=1, reach=None)``; None for another method."""
    match = LABEL.fullmatch(method)
    if match is None:
        return None
    changed = dict(part.split("=", 1) for part in (match["settings"] or "").split(", ") if part)
    return {name: shown(value) for name, value in asdict(Smart()).items()} | changed


def shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def table5_settings(row: dict[str, str]) -> dict[str, str]:
    """The settings of a row of Table 5. The printed schedule does not exist if it starts more than one above its end."""
    settings = {name: shown(value) for name, value in asdict(Smart.paper()).items()} | {"start": "0.5", "end": "1e-05"}
    settings |= dict(part.split("=", 1) for part in row["settings"].split())
    if settings["schedule"] == "fixed":
        settings["end"] = settings["start"]
    elif float(settings["start"]) - float(settings["end"]) >= 1:
        settings["schedule"] = "geometric"
    return settings


def table5_cells(root: Path) -> list[tuple[dict[str, str], Row | None]]:
    """Every cell of Table 5, with our run of it on BCCD."""
    rows = [row for _, row in all_rows(root) if (row["model"], row["data"], row["sparsity"]) == ("yolov5m", "bccd", 0.5)]

    def run_of(cell: dict[str, str]) -> Row | None:
        search, settings = f"+ {cell['search_epochs'] or 100} search +", table5_settings(cell)
        return next((row for row in rows if search in row["protocol"] and settings_of(row["method"]) == settings), None)

    return [(cell, run_of(cell)) for cell in read_csv(root, "paper-table5")]


def table5_lines(root: Path, page: Path) -> list[str]:
    lines = ["| changed | value | paper, COCO | ours, BCCD |", "| --- | --- | ---: | ---: |"]
    for cell, row in table5_cells(root):
        ours = "-" if row is None else described(row)
        lines.append(f"| {cell['changed']} | {cell['value']} | {100 * float(cell['map']):.1f} | {ours} |")
    return [*lines, "", "YOLOv5m without 50 % of its 16x8 blocks, mAP in %, ours with (n). - is missing."]


def counted_table5(root: Path) -> tuple[int, int]:
    cells = table5_cells(root)
    return len(cells), sum(row is not None for _, row in cells)


def count_lines(root: Path, page: Path) -> list[str]:
    """How many cells of the paper's tables have a number of ours beside them."""
    counts = {
        "2: CIFAR-10, 12 + 48 or 40 + 160 epochs": counted_table2(root),
        "3: ImageNet, COCO and Cityscapes, ours on smaller data": counted_table3(root),
        "5: ablation, ours on BCCD": counted_table5(root),
    }
    lines = ["| table of the paper | numbers | with one of ours |", "| --- | ---: | ---: |"]
    return lines + [f"| {name} | {numbers} | {recorded} |" for name, (numbers, recorded) in counts.items()]


# -- summary ------------------------------------------------------------------------------------------------------------------


def comparisons(root: Path) -> list[tuple[Path, Row, dict[str, Row]]]:
    """The default SMART in every record, and the other methods with their default settings under the same conditions."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    for folder, row in all_rows(root):
        if row["metric"] in METRICS:
            budget = (row["sparsity"], *(row.get(name) for name in ("macs", "params", "cycles")))
            key = (folder, row["model"], row["data"], row["block"], budget, row["protocol"])
            groups.setdefault(key, {}).setdefault(row["metric"], {})[row["method"]] = row
    found = []
    for (folder, *_), metrics in groups.items():
        rows = next(metrics[metric] for metric in METRICS if metric in metrics)
        others = {name: rows[name] for name in METHODS[1:] if name in rows}
        if "smart" in rows and others:
            found.append((folder, rows["smart"], others))
    return found


def verdict(smart: Row, other: Row) -> str:
    """Ahead or behind if the means differ by more than two standard errors of their difference."""
    difference = smart["mean"] - other["mean"]
    if smart["std"] is None or other["std"] is None:
        return "one seed"
    error = math.sqrt(smart["std"] ** 2 / smart["n"] + other["std"] ** 2 / other["n"])
    return "level" if abs(difference) <= 2 * error else "ahead" if difference > 0 else "behind"


def best_rival(others: dict[str, Row]) -> Row | None:
    """The most accurate method that the paper compares SMART with."""
    return max((row for name, row in others.items() if name != "gradual"), key=lambda row: float(row["mean"]), default=None)


def comparison_lines(root: Path, page: Path) -> list[str]:
    """SMART against gradual magnitude, and against the best of the paper's methods, in every record that has both."""
    lines = [
        "| network, data | removed | protocol | SMART | gradual | SMART is | best of PDP, PaS, AWG, AC/DC | SMART is |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for folder, smart, others in sorted(comparisons(root), key=lambda item: (item[1]["data"], item[1]["model"], item[0])):
        gradual, rival = others.get("gradual"), best_rival(others)
        epochs, _, rest = smart["protocol"].partition(" epochs")
        details = rest.strip(", ") if len(rest) <= MAX_DETAILS else ""
        parts = [f"[{smart['model']}, {smart['data']}]({os.path.relpath(folder, page.parent)})", removed(smart)]
        parts += [", ".join(filter(None, (epochs, details))), described(smart)]
        parts += ["-", ""] if gradual is None else [described(gradual), verdict(smart, gradual)]
        parts += ["-", ""] if rival is None else [f"{rival['method']} {described(rival)}", verdict(smart, rival)]
        lines.append(f"| {' | '.join(parts)} |")
    return [*lines, "", f"In % (n), with the default settings of both methods. {LEVEL} The test split is used if it was recorded."]


def summary_lines(root: Path, page: Path) -> list[str]:
    """How often SMART is ahead of gradual magnitude and of the best of the paper's methods, by network."""
    groups: dict[str, list[tuple[str, Row, Row]]] = {}
    for _, smart, others in sorted(comparisons(root), key=lambda item: (item[1]["data"], item[1]["model"])):
        for title, row in (("gradual", others.get("gradual")), ("the best of PDP, PaS, AWG, AC/DC", best_rival(others))):
            if row is not None:
                groups.setdefault(title, []).append((f"{smart['model']}, {smart['data']}", smart, row))
    kinds = ("ahead", "level", "behind", "one seed")
    lines = [
        f"| SMART compared with | network, data | {' | '.join(kinds)} | difference in points |",
        f"| --- | --- |{' ---: |' * len(kinds)} --- |",
    ]
    for title, pairs in groups.items():
        for network in [*dict.fromkeys(name for name, *_ in pairs), "all"]:
            rows = [(smart, row) for name, smart, row in pairs if network in (name, "all")]
            counts = [sum(verdict(*pair) == kind for pair in rows) for kind in kinds]
            differences = sorted(100 * (smart["mean"] - row["mean"]) for smart, row in rows)
            ends = f"{differences[0]:+.1f}" + f" to {differences[-1]:+.1f}" * (len(rows) > 1)
            lines.append(f"| {title} | {network} | {' | '.join(map(str, counts))} | {ends} |")
    return [*lines, "", f"Number of comparisons. {LEVEL}"]


def removed(row: Row) -> str:
    for name in ("macs", "params", "cycles"):
        if row.get(name) is not None:
            return f"{100 * row[name]:g} % of the {'MACs' if name == 'macs' else name}"
    return f"{100 * row['sparsity']:g} % of {row['block']}"


PAPER_TABLES: dict[str, Callable[[Path, Path], list[str]]] = {
    "paper-table2": paper_lines,
    "paper-cells": all_cells_lines,
    "paper-table3": table3_lines,
    "paper-table5": table5_lines,
    "paper-count": count_lines,
    "comparisons": comparison_lines,
    "summary": summary_lines,
}
