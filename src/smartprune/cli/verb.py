"""What every verb of the command line shares."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import SmartpruneError

Verbs = Any  # argparse keeps the type of its sub-commands to itself


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


def show(args: argparse.Namespace, found: Any) -> None:
    """Prints a result as text, or with --json as its plain data."""
    print(json.dumps(found.to_json(), indent=2) if args.json else found)
