"""The front page: its program prints what the page shows, its figures are those of the records, and a phone can show it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smartprune as sp

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
NUMBERS = re.compile(r"[\d.]+|█[█·]*|·+|sha256:\w+")
EXACT = re.compile(r"blocks of the pruned layers\s+864\s+87\s+777\s+89.93%")  # exact whatever the machine


def rows(of: str) -> list[list[str]]:
    """The cells of the table that begins with this heading."""
    table = PAGE[PAGE.index(of) :].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def record(name: str) -> list[dict[str, Any]]:
    data: dict[str, Any] = json.loads((ROOT / "records" / name / "result.json").read_text())
    return list(data["rows"])


def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    for package in ("sklearn", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    code = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    env = {**os.environ, "PYTHONPATH": str(Path(sp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shown = re.findall(r"<!-- output -->\n```\n(.*?)\n```", PAGE, re.S)[0]
    assert [NUMBERS.sub("", line).split() for line in result.stdout.rstrip().splitlines()] == [
        NUMBERS.sub("", line).split() for line in shown.splitlines()
    ]
    assert EXACT.search(shown)
    assert EXACT.search(result.stdout)
    dense, pruned = (float(value) for value in re.findall(r"accuracy ([\d.]+)%", result.stdout))
    assert dense > 90
    assert pruned > 90
    assert (tmp_path / "digits.onnx").exists()


def test_accuracies_are_those_of_the_records() -> None:
    table = rows("| network | removed | dense")
    assert len(table) == 6
    for network, removed, dense, pruned, link in table:
        (folder,) = re.findall(r"records/([\w-]+)", link)
        sparsity = float(removed.split()[0]) / 100
        found = [
            row for row in record(folder) if (row["model"], row["method"], row["sparsity"]) == (network.lower(), "smart", sparsity)
        ]
        assert [(f"{row['dense']['mean'] * 100:.2f}", f"{row['mean'] * 100:.2f}") for row in found] == [(dense, pruned)], network


def test_speeds_are_those_of_the_record() -> None:
    table = rows("| network | float32")
    assert len(table) == 5
    speeds = {(row["method"], row["sparsity"]): row["mean"] for row in record("runtime-cpu") if row["metric"] == "times faster"}
    for network, float32, int8 in table:
        for kind, shown in (("float32", float32), ("int8", int8)):
            assert f"{speeds[f'{network.lower()}, {kind}', 0.9]:.1f}" == shown, (network, kind)


def test_the_page_is_short() -> None:
    prose = re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", " ", PAGE, flags=re.S)
    assert len(re.findall(r"[A-Za-z][\w'-]*", prose)) < 1000


def test_a_phone_can_show_every_line_of_code_and_every_table() -> None:
    code = "".join(re.findall(r"```\w*\n(.*?)```", PAGE, re.S))
    assert max(map(len, code.splitlines())) <= 82
    for line in PAGE.splitlines():
        if line.startswith("|"):
            assert len(line.split("|")) <= 7
            assert len(re.sub(r"\]\([^)]*\)", "", line)) <= 110, line
