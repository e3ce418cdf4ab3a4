"""Helpers that the commands share."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..budgets import budget_names
from ..errors import SmartpruneError
from ..files import check_no_overwrite, check_writable
from ..run_files import PROTECTED

Subparsers = Any  # argparse does not export the type
Target = str | Path | None


# The groups of options in the help of every command, in this order, and the options that are not in the first one.
COMMON, BUDGET, LAYERS, SCHEDULE, DATA, DEVICES, OUTPUT = "common", "budget", "layers", "schedule", "data", "devices", "output"
GROUPS = {
    COMMON: (),
    BUDGET: (*budget_names(), "sparsities", "budget", "npu", "cost-table", "floor"),
    LAYERS: ("include", "skip", "map"),
    SCHEDULE: ("rounds", "seconds", "every", "minutes", "jobs", "dense-seed"),
    DATA: ("data", "task-set", "input", "batch", "samples", "split", "calibration", "detections", "annotations"),
    DEVICES: ("device", "threads", "engines", "cpu"),
    OUTPUT: ("out", "json", "csv", "html", "figures", "plot", "record", "note"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose options are grouped in its help, and whose errors are one line and a hint, instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        super().__init__(**options, add_help=False)
        for title in ("arguments", *GROUPS):
            self.group(title)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of that title, which is new if there is none."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument to the group that its name belongs to."""
        flag = names[-1]
        listed = (title for title, flags in GROUPS.items() if flag.removeprefix("--") in flags)
        return self.group("arguments" if not flag.startswith("-") else next(listed, COMMON)).add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all options\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Adds the name that was meant, if there is a similar one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, error.message + meant(str(value), action.choices or ())) from None

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Ends with an error about arguments that the command does not have."""
        flag = next((word for word in words if word.startswith("-")), "").partition("=")[0]
        self.error(f"unrecognized arguments: {' '.join(words)}{meant(flag, self._option_string_actions)}")


def meant(word: str, names: Iterable[str]) -> str:
    """A question about the most similar name, or nothing.

    >>> meant("prun", ["plan", "prune"])
    '; did you mean prune?'
    """
    similar = difflib.get_close_matches(word, list(names), 1, 0.7)
    return f"; did you mean {similar[0]}?" if similar else ""


NAME_OR_TRUST = "--model {model} or --trust"  # what allows a file to name a function to import


def add_trust(parser: Parser, what: str = "the run folder") -> None:
    """Adds the flag that allows a file to name a function to import."""
    parser.add_argument("--trust", action="store_true", help=f"run the function that {what} names as its model, MODULE:FUNCTION")


def add_command(subparsers: Subparsers, name: str, summary: str, example: str) -> Parser:
    """A command with its one-line summary and examples."""
    parser: Parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser, announce_always=False)
    return parser


@contextmanager
def argument_errors(args: argparse.Namespace) -> Iterator[None]:
    """A context in which errors are reported as wrong arguments, with exit code 2."""
    try:
        yield
    except SmartpruneError as error:
        args.parser.error(str(error))


def check_outputs(outputs: Mapping[str, Target], inputs: Mapping[str, Target]) -> None:
    """Raises before any work on output files that cannot be written, that are inputs, or that are named twice.

    ``outputs`` are by flag, ``inputs`` by a description.
    """
    flags: dict[str, str] = {}  # by real path
    for flag, path in outputs.items():
        if path is None:
            continue
        try:
            check_writable(path)
        except SmartpruneError as error:
            raise SmartpruneError(f"{flag} {error}") from None
        check_no_overwrite(path, inputs, flag)
        real = os.path.realpath(path)
        if real in flags and (os.path.isfile(real) or not os.path.exists(real)):
            raise SmartpruneError(f"{flags[real]} and {flag} are both {path}; give two different files")
        flags[real] = flag


def files_of_run(folder: Target, but: str | None = None) -> dict[str, Target]:
    """The files of a run folder that other commands must not overwrite, except the file ``but``. Empty for other paths."""
    if folder is None or not os.path.isdir(folder):
        return {}
    return {f"the {name} of the run": Path(folder) / name for name in PROTECTED if name != but}


def print_result(args: argparse.Namespace, result: Any) -> None:
    """Prints a result as text, or as JSON with --json."""
    print(json.dumps(result.to_json(), indent=2) if args.json else result)
