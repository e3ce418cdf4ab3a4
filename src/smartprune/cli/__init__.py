"""The command line. Every command is a thin layer over the library.

Results go to stdout, progress and messages to stderr. Exit codes: 0 success, 1 failed or stopped, 2 wrong arguments.
Commands import torch when they run, so that help is shown without delay. A new command is a function that adds its
parser, listed in ``COMMANDS``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import SmartpruneError
from .bench import add_bench
from .common import Parser, Subparsers
from .compact import add_compact
from .compare import add_compare
from .evaluate import add_eval
from .export import add_export
from .inspect import add_plan, add_report, add_verify
from .pack import add_pack, add_unpack
from .prune import add_prune
from .streams import announce, discard_unwritten, prepare_streams, print_message, short_warnings
from .sweep import add_sweep
from .train import add_train
from .watch import add_watch

COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    add_train,
    add_prune,
    add_plan,
    add_report,
    add_verify,
    add_eval,
    add_pack,
    add_unpack,
    add_export,
    add_compact,
    add_bench,
    add_compare,
    add_sweep,
    add_watch,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    prepare_streams()
    try:
        return _run(argv)
    finally:
        discard_unwritten(sys.stderr)


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="smartprune",
        description="Block pruning with exact budgets: removes exactly as many blocks of weights as requested,\n"
        "and records and verifies the result.",
        epilog="smartprune COMMAND --help shows the options of a command, with examples.\n"
        "Exit codes: 0 success, 1 failed or stopped, 2 wrong arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"smartprune {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in COMMANDS:
        add(subparsers)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    args.words = sys.argv[1:] if argv is None else list(argv)
    try:
        announce(args.parser.prog, terminal_only=not args.announce_always)
        with short_warnings():
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SmartpruneError as error:
        print_message(f"smartprune: {error}")
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print_message(f"smartprune: PyTorch is not installed for {sys.executable}; run: {sys.executable} -m pip install torch")
        return 1
    except BrokenPipeError:  # the reader of the output ended first, as in `smartprune report ... | head`
        discard_unwritten(sys.stdout)
        return 1
    except OSError as error:  # most likely a full disk, where the output or temporary files are written
        if error.errno is None:  # raised by a library, not by the system
            raise
        discard_unwritten(sys.stdout)
        where = "the output, or a temporary file," if error.filename is None else error.filename
        print_message(f"smartprune: {where} cannot be written or read ({error.strerror or error}); fix that and try again")
        return 1
    except KeyboardInterrupt:
        print_message("smartprune: stopped")
        return 1
