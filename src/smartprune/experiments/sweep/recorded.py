"""What need not be run: cells whose value is in a record, wherever that was made; and the list of all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SmartpruneError
from ..compare.identity import RunKey, row_keys, run_key
from ..compare.record import RESULT, load_rows
from .grid import Cell

if TYPE_CHECKING:
    from . import Sweep


def recorded(folders: Sequence[Path], cells: Sequence[Cell]) -> set[str]:
    """Names of the cells whose value is in one of the records; a folder is a record, or holds some."""
    known = {found for folder in folders for record in _records(folder) for found in _runs(record)}
    return {cell.name for cell in cells if known.intersection(_keys(cell))}


def _records(folder: Path) -> list[Path]:
    found = [folder] if (folder / RESULT).exists() else sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
    if not found:
        what = "holds no record" if folder.is_dir() else "is not a folder"
        raise SmartpruneError(f"{folder} {what}; give a folder with a {RESULT}, or one that holds such folders")
    return found


def _runs(record: Path) -> Iterator[RunKey]:
    for number, row in enumerate(load_rows(record)):
        yield from row_keys(row, f"{record / RESULT}: rows[{number}]")


def _keys(cell: Cell) -> list[RunKey]:
    """What the cell may be called in a record: ``amp: auto`` was decided by the machine that ran it."""
    config = asdict(cell.config)
    return [run_key(config | {"amp": amp}) for amp in (("bf16", "off") if config["amp"] == "auto" else (config["amp"],))]


def listing(sweep: Sweep, cells: Sequence[Cell], known: set[str]) -> str:
    """All cells and what became of each, then the dense models that the missing ones start from."""

    def state(cell: Cell) -> str:
        return "done" if sweep.done(cell) else "recorded" if cell.name in known else "missing"

    states = [state(cell) for cell in cells]
    lines = [f"{told:<8}  {cell.name}" for told, cell in zip(states, cells, strict=True)]
    needed = Counter(cell.dense for told, cell in zip(states, cells, strict=True) if told == "missing" and cell.dense)
    if needed:
        lines += ["", "dense models of the missing cells"]
    for name, count in needed.items():
        told = "done" if sweep.dense_path(name).exists() else "missing"
        lines.append(f"{told:<8}  {name}  for {count} cell{'s' * (count > 1)}")
    counts = ", ".join(f"{states.count(told)} {told}" for told in ("done", "recorded", "missing"))
    return "\n".join([*lines, "", f"{len(cells)} cells: {counts}"])
