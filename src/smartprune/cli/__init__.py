"""The command line: every verb is a short function around what the library does.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 failed or stopped, 2 bad arguments. Torch is imported
inside the commands, so that help comes at once. A new verb is a function that adds its parser, and a name in ``VERBS``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import SmartpruneError
from .bench import bench_verb
from .common import Verbs
from .compare import compare_verb
from .evaluate import eval_verb
from .export import export_verb
from .inspect import plan_verb, report_verb, verify_verb
from .pack import pack_verb, unpack_verb
from .streams import ready_streams, settle, tell
from .sweep import sweep_verb
from .train import train_verb
from .watch import watch_verb

VERBS: tuple[Callable[[Verbs], None], ...] = (
    train_verb,
    plan_verb,
    report_verb,
    verify_verb,
    eval_verb,
    pack_verb,
    unpack_verb,
    export_verb,
    bench_verb,
    compare_verb,
    sweep_verb,
    watch_verb,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    ready_streams()
    try:
        return _run(argv)
    finally:
        settle(sys.stderr)


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="smartprune",
        description="Exact-budget block pruning: finds which blocks of a network can go,\n"
        "removes exactly as many as asked for, and proves it.",
        epilog="smartprune VERB --help shows a verb's options with an example.\n"
        "Exit codes: 0 done, 1 failed or stopped, 2 bad arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"smartprune {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for add in VERBS:
        add(verbs)
    args = parser.parse_args(argv)
    args.words = sys.argv[1:] if argv is None else list(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SmartpruneError as error:
        tell(f"smartprune: {error}")
        return 1
    except BrokenPipeError:  # the reader of our output went away, as in `smartprune report ... | head`
        settle(sys.stdout)
        return 1
    except OSError as error:  # a full disk, most likely: where our output goes, or where temporary files lie
        if error.errno is None:  # of a library, not of the system: it is about neither
            raise
        settle(sys.stdout)
        where = "the output, or a temporary file," if error.filename is None else error.filename
        tell(f"smartprune: {where} cannot be written or read ({error.strerror or error}); try again once it can")
        return 1
    except KeyboardInterrupt:
        tell("smartprune: stopped")
        return 1
