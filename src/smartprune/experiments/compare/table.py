"""A comparison as text: a row per method, and for every sparsity the metric, what it lost, and n; or a line per run."""

from __future__ import annotations

import csv
import io
import json
import statistics
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import text
from .names import plain

if TYPE_CHECKING:
    from . import Comparison, Row

WIDTH = 100
SIDE_BY_SIDE = 3  # sparsities in one table
MACS_SIDE_BY_SIDE = 5  # of one number each, and room for the name of a method


def comparison_text(found: Comparison, ascii_only: bool) -> str:
    out: list[str] = []
    for (data, model, block, protocol, metric), rows in found.groups().items():
        out += ["", f"{data}, {model}, blocks of {block}: {metric} in %, test split, after the last epoch"]
        out += textwrap.wrap(protocol, WIDTH)
        shares = sorted({row.entries[0].share for row in rows}, key=lambda share: (share[0] != "sparsity", share))
        for first in range(0, len(shares), SIDE_BY_SIDE):
            out += ["", *_table(rows, shares[first : first + SIDE_BY_SIDE], ascii_only)]
        out += _macs(rows, shares, ascii_only)
    if found.left_out:
        out += ["", "left out"]
        out += [f"  {folder}: {reason}" for folder, reason in found.left_out]
    return "\n".join(out[1:])


def _table(rows: Sequence[Row], shares: Sequence[tuple[str, float]], ascii_only: bool) -> list[str]:
    header = ["method", "dense"]
    for share in shares:
        header += [_asked(share), "diff", "n"]
    methods = dict.fromkeys(row.entries[0].method for row in rows)
    lines: list[list[str]] = []
    for method in methods:
        of_method = {row.entries[0].share: row for row in rows if row.entries[0].method == method}
        shown = [of_method[share] for share in shares if share in of_method]
        if not shown:
            continue
        dense = {entry.config["seed"]: entry.dense for row in shown for entry in row.entries}
        line = [method, spread(list(dense.values()), ascii_only)]
        for share in shares:
            if share in of_method:
                row = of_method[share]
                line += [spread(row.values, ascii_only), f"{100 * row.difference:+.2f}", str(len(row.entries))]
            else:
                line += ["-", "", ""]
        lines.append(line)
    return text.table(header, lines, "<>" + ">>>" * len(shares), WIDTH)


def _macs(rows: Sequence[Row], shares: Sequence[tuple[str, float]], ascii_only: bool) -> list[str]:
    """What the budget does not say: as many blocks of one layer take more time than of another."""
    shares = [share for share in shares if share[0] != "macs"]
    told = {(row.entries[0].method, row.entries[0].share): row.macs_left for row in rows if row.macs_left}
    out: list[str] = []
    for first in range(0, len(shares), MACS_SIDE_BY_SIDE):
        some = shares[first : first + MACS_SIDE_BY_SIDE]
        methods = [m for m in dict.fromkeys(row.entries[0].method for row in rows) if any((m, share) in told for share in some)]
        lines = [[m, *(spread(told[m, s], ascii_only) if (m, s) in told else "-" for s in some)] for m in methods]
        if lines:
            out += ["", *text.table(["MACs left, %", *map(_asked, some)], lines, "<" + ">" * len(some), WIDTH)]
    return out


def _asked(share: tuple[str, float]) -> str:
    kind, number = share
    return plain(number) if kind == "sparsity" else f"{kind} {plain(number)}"


def spread(values: Sequence[float], ascii_only: bool = False) -> str:
    """Mean and standard deviation in percent.

    >>> spread([0.91, 0.93]), spread([0.5])
    ('92.00 ± 1.41', '50.00')
    """
    mean = f"{100 * statistics.fmean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} {'+-' if ascii_only else '±'} {100 * statistics.stdev(values):.2f}"


def comparison_csv(found: Comparison) -> str:
    """One line per run."""
    from . import protocol

    lines = []
    for entry in found.entries:
        config = entry.config
        lines.append(
            {
                "folder": str(entry.folder),
                "data": entry.data,
                "model": config["model"],
                "block": config["block"],
                "method": config["method"],
                "settings": json.dumps(config["settings"]),
                "sparsity": config.get("sparsity"),
                "macs": config.get("macs"),
                "cycles": config.get("cycles"),
                "seed": config["seed"],
                "metric": entry.metric,
                "pruned": entry.pruned,
                "dense": entry.dense,
                "difference": entry.pruned - entry.dense,
                "macs_left": entry.macs_left,
                "seconds": entry.seconds,
                "device": entry.versions.get("device", ""),
                "torch": entry.versions.get("torch", ""),
                "protocol": protocol(config),
            }
        )
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
