"""Leaves out cells whose result is in a record, and lists the state of all cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ...errors import SmartpruneError
from ...run_files import RESULT
from ..compare.identity import RunKey, row_keys, run_key
from ..compare.record import load_rows
from .grid import Cell
from .sweep import Sweep


def recorded_cells(folders: Sequence[Path], cells: Sequence[Cell]) -> set[str]:
    """Names of the cells whose result is in one of the records. A folder is a record, or holds records."""
    known = {key for folder in folders for record in _find_records(folder) for key in _keys_of_record(record)}
    return {cell.name for cell in cells if known.intersection(_keys_of_cell(cell))}


def _find_records(folder: Path) -> list[Path]:
    records = [folder] if (folder / RESULT).exists() else sorted(path.parent for path in folder.glob(f"*/{RESULT}"))
    if not records:
        problem = "holds no record" if folder.is_dir() else "is not a folder"
        raise SmartpruneError(f"{folder} {problem}; give a folder with a {RESULT}, or one that holds such folders")
    return records


def _keys_of_record(record: Path) -> Iterator[RunKey]:
    for number, row in enumerate(load_rows(record)):
        yield from row_keys(row, f"{record / RESULT}: rows[{number}]")


def _keys_of_cell(cell: Cell) -> list[RunKey]:
    """The keys that the cell may have in a record. The machine that ran it turned ``amp: auto`` into ``bf16`` or ``off``."""
    config = asdict(cell.config)
    return [run_key(config | {"amp": amp}) for amp in (("bf16", "off") if config["amp"] == "auto" else (config["amp"],))]


def list_cells(sweep: Sweep, cells: Sequence[Cell], recorded: set[str]) -> str:
    """The state of every cell, then the dense models that the missing cells start from."""

    def state_of(cell: Cell) -> str:
        return "done" if sweep.done(cell) else "recorded" if cell.name in recorded else "missing"

    states = [state_of(cell) for cell in cells]
    lines = [f"{state:<8}  {cell.name}" for state, cell in zip(states, cells, strict=True)]
    needed = Counter(cell.dense for state, cell in zip(states, cells, strict=True) if state == "missing" and cell.dense)
    if needed:
        lines += ["", "dense models of the missing cells"]
    for name, count in needed.items():
        state = "done" if sweep.dense_models.path(name).exists() else "missing"
        lines.append(f"{state:<8}  {name}  for {count} cell{'s' * (count > 1)}")
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("done", "recorded", "missing"))
    return "\n".join([*lines, "", f"{len(cells)} cells: {counts}"])
