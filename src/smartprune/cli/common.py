"""What every verb of the command line shares."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SmartpruneError
from ..files import check_no_overwrite, check_writable
from ..run_files import BENCH, CHECKPOINT, CONFIG, DENSE, METRICS, MODEL, RECEIPT, RESULT, SCORES

Verbs = Any  # argparse keeps the type of its sub-commands to itself
Target = str | Path | None
RUN_FILES = (CONFIG, METRICS, CHECKPOINT, RESULT, DENSE, MODEL, RECEIPT, SCORES, BENCH)


def add_verb(verbs: Verbs, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A sub-command with its one-line summary and an example."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


@contextmanager
def arguments(args: argparse.Namespace) -> Iterator[None]:
    """What goes wrong in here is the fault of an argument: exit code 2."""
    try:
        yield
    except SmartpruneError as error:
        args.parser.error(str(error))


def check_outputs(outputs: Mapping[str, Target], read: Mapping[str, Target]) -> None:
    """Refuses, before any work, files that cannot be written, that are read, or that are named twice. ``outputs`` are by flag,
    ``read`` by a word for what they are."""
    seen: dict[str, str] = {}
    for flag, path in outputs.items():
        if path is None:
            continue
        try:
            check_writable(path)
        except SmartpruneError as error:
            raise SmartpruneError(f"{flag} {error}") from None
        check_no_overwrite(path, read, flag)
        real = os.path.realpath(path)
        if real in seen and (os.path.isfile(real) or not os.path.exists(real)):
            raise SmartpruneError(f"{seen[real]} and {flag} are both {path}; give two files")
        seen[real] = flag


def files_of_run(folder: Target, but: str | None = None) -> dict[str, Target]:
    """What a run folder holds and nothing but the run may write, if it is one; ``but`` is the file that a verb writes."""
    if folder is None or not os.path.isdir(folder):
        return {}
    return {f"the {name} of the run": Path(folder) / name for name in RUN_FILES if name != but}


def show(args: argparse.Namespace, found: Any) -> None:
    """Prints a result as text, or with --json as its plain data."""
    print(json.dumps(found.to_json(), indent=2) if args.json else found)
