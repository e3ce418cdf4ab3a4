"""``smartprune watch``: follows a run in the terminal, also in a mounted folder of another machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import SmartpruneError
from ..run_files import CONFIG
from .common import Subparsers, add_command, argument_errors
from .streams import print_message


def add_watch(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "watch",
        "follow a run: stage, loss, metric, temperature, undecided blocks, time left",
        "  smartprune watch runs/mine\n  smartprune watch /mnt/server/runs/mine --every 10\n  smartprune watch runs/mine --once\n\n"
        "It only reads files. It ends with the run, or with Ctrl-C.",
    )
    parser.add_argument("path", help="a run folder")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="seconds between updates (default: 2)")
    parser.add_argument("--once", action="store_true", help="print the current state and exit")
    parser.add_argument("--wait", action="store_true", help="wait for the folder if it does not exist yet")
    parser.set_defaults(run=run_watch)


def run_watch(args: argparse.Namespace) -> int:
    from .. import text
    from ..training.monitor import follow, read_snapshot, status_lines

    with argument_errors(args):
        if not 0.05 <= args.every <= 86_400:
            raise SmartpruneError(f"--every {args.every:g} must be from 0.05 to 86400 seconds")
    config = Path(args.path) / CONFIG
    try:
        if args.wait and not config.is_file():
            print_message(f"waiting for {config}")
            while not config.is_file():
                time.sleep(args.every)
        if not config.is_file():
            raise SmartpruneError(f"{args.path} holds no run (no {CONFIG}); add --wait if it is about to start")
        if args.once:
            print("\n".join(status_lines(read_snapshot(args.path), text.stdout_is_ascii())))
        else:
            follow(args.path, args.every)
    except KeyboardInterrupt:  # the usual way to stop watching
        print_message("")
    return 0
