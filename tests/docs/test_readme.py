"""The front page: its program prints what the page shows, its figures are those of the records, and a phone can show it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smartprune as sp
from smartprune.cli import COMMANDS, main
from smartprune.cli.common import Parser

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
NUMBERS = re.compile(r"[\d.]+|█[█·]*|·+|sha256:\w+")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
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
    code = PROGRAMS[0]
    env = {**os.environ, "PYTHONPATH": str(Path(sp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shown = re.findall(r"<!-- output -->\n```\n(.*?)\n```", PAGE, re.S)[0]
    assert [NUMBERS.sub("", line).split() for line in result.stdout.rstrip().splitlines()] == [
        NUMBERS.sub("", line).split() for line in shown.splitlines()
    ]
    assert EXACT.search(shown)
    assert EXACT.search(result.stdout)
    (pruned,) = (float(value) for value in re.findall(r"accuracy ([\d.]+)%", result.stdout))
    (dense,) = re.findall(r"Without the pruner, the same loop reaches ([\d.]+) %", PAGE)
    assert abs(pruned - float(dense)) < 2
    assert (tmp_path / "net.onnx").exists()


def accuracy(scope: dict[str, Any]) -> float:
    (line,) = (line for line in PROGRAMS[0].splitlines() if line.startswith("correct ="))
    exec(line, scope)
    return 100 * float(scope["correct"].float().mean())


def test_the_loop_without_the_pruner_reaches_what_the_page_says_and_can_be_pruned_without_training() -> None:
    pytest.importorskip("sklearn")
    scope: dict[str, Any] = {}
    loop = re.sub(r"pruner = sp\.attach\([^=]*=[^=]*=[^=]*=.*\n|.*pruner\..*\n", "", PROGRAMS[0].partition("receipt = ")[0])
    assert "pruner" not in loop
    exec(loop, scope)
    dense = accuracy(scope)
    (written,) = re.findall(r"Without the pruner, the same loop reaches ([\d.]+) %", PAGE)
    assert abs(dense - float(written)) < 1  # other machines add in another order
    exec(PROGRAMS[1], scope)
    assert (scope["receipt"].blocks.kept, scope["receipt"].blocks.total) == (432, 864)
    assert accuracy(scope) > dense - 2


def test_every_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the commands do is left out."""
    (block,) = re.findall(r"## Commands\n\n```\n(.*?)```", PAGE, re.S)
    commands = [shlex.split(line) for line in block.splitlines()]
    assert len(commands) == 6
    accepted = []
    parse = Parser.parse_known_args

    def parse_only(parser: Parser, *args: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = parse(parser, *args, **options)
        found.run = lambda args: accepted.append(args.words) or 0
        return found, unknown

    monkeypatch.setattr(Parser, "parse_known_args", parse_only)
    assert [main(words[1:]) for words in commands] == [0] * 6
    assert accepted == [words[1:] for words in commands]
    listed = {name for add in COMMANDS for name in [add.__name__.removeprefix("add_")]}
    assert {words[1] for words in commands} <= listed
    assert set(re.findall(r"`(\w+)`", PAGE.partition("lists the others, such as")[2].partition("\n")[0])) <= listed


def test_accuracies_are_those_of_the_records() -> None:
    table = rows("| network, share removed")
    assert len({label.split("]")[0] for label, *_ in table}) == 5
    for label, dense, pruned in table:
        ((network, folder, percent, unit),) = re.findall(r"\[(\w+)\]\(records/([\w-]+)\), (\d+) %(.*)", label)
        of = {"": "sparsity", " of its MACs": "macs"}[unit]
        wanted = (network.lower(), "smart", int(percent) / 100)
        matches = [row for row in record(folder) if (row["model"], row["method"], row[of]) == wanted]
        assert [(f"{row['dense']['mean'] * 100:.2f}", f"{row['mean'] * 100:.2f}") for row in matches] == [(dense, pruned)], network


def test_speeds_are_those_of_the_record() -> None:
    """A speed is the time of the fastest dense float32 engine, divided by that of the column."""
    table = rows("| network | int8")
    assert len(table) == 6
    times = {(row["method"], row["sparsity"]): row["mean"] for row in record("runtime-cpu") if row["metric"] == "ms"}

    def fastest(name: str, engines: list[str], suffix: str = "") -> float:
        return min(times[key] for engine in engines if (key := (f"{name}: {engine}{suffix}", 0)) in times)

    for network, int8, pruned, pruned_int8 in table:
        name = network.lower().replace(", even mask", " (even mask)")
        dense = fastest(name, ["torch NCHW", "torch NHWC", "onnxruntime", "openvino"])
        assert f"{dense / fastest(name, ['onnxruntime', 'openvino'], ' int8'):.1f}" == int8, network
        assert f"{dense / times[f'{name}: smartprune', 0.9]:.1f}" == pruned, network
        refused = network == "MobileNetV2"  # by the self-check of int8
        assert pruned_int8 == ("-" if refused else f"{dense / times[f'{name}: smartprune int8', 0.9]:.1f}"), network


def test_int8_costs_what_the_record_says() -> None:
    accuracy = {row["method"]: row["mean"] for row in record("runtime-cpu-learned") if row["metric"] == "accuracy"}
    (points,) = re.findall(r"int8 costs a pruned ResNet18\s+([\d.]+) points", PAGE)
    lost = accuracy["smartprune (gradual, 92.9 %)"] - accuracy["smartprune int8 (gradual, 92.9 %)"]
    assert f"{100 * lost:.2f}" == points


def words(text: str) -> int:
    """The words outside code blocks, comments and the targets of links. Numbers do not count."""
    return len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r"```.*?```|<!--.*?-->|\]\([^)]*\)", " ", text, flags=re.S)))


def test_the_page_is_short() -> None:
    """At most 900 words of prose, and 1000 with the cells of the tables."""
    assert words(re.sub(r"^\|.*$", "", PAGE, flags=re.M)) <= 900
    assert words(PAGE) <= 1000


def test_a_phone_can_show_every_line_of_code_and_every_table() -> None:
    code = "".join(re.findall(r"```\w*\n(.*?)```", PAGE, re.S))
    assert max(map(len, code.splitlines())) <= 80
    commands = "".join(re.findall(r"```\n(make .*?|smartprune .*?)```", PAGE, re.S))
    assert commands.count("smartprune") == 6
    assert max(map(len, commands.splitlines())) <= 42
    for line in PAGE.splitlines():
        if line.startswith("|"):
            assert len(line.split("|")) <= 7
            assert len(re.sub(r"\]\([^)]*\)", "", line)) <= 110, line
