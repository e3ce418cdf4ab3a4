"""``smartprune watch``: follows a run in the terminal, from this machine or over a mounted folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..errors import SmartpruneError
from ..run_files import CONFIG
from .common import Verbs, add_verb, arguments
from .streams import tell


def watch_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "watch",
        "follow a run folder while it grows: stage, loss, metric, temperature, undecided blocks, time left",
        "  smartprune watch runs/mine\n  smartprune watch /mnt/server/runs/mine --every 10\n  smartprune watch runs/mine --once\n\n"
        "Reads only, so it disturbs nothing. Ends when the run does, or with Ctrl+C.",
    )
    parser.add_argument("path", help="a run folder")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often to look (default: 2)")
    parser.add_argument("--once", action="store_true", help="print where the run stands and end")
    parser.add_argument("--wait", action="store_true", help="wait for the folder if it is not there yet")
    parser.set_defaults(run=run_watch)


def run_watch(args: argparse.Namespace) -> int:
    from .. import text
    from ..training.monitor import follow, read_snapshot, status_lines

    with arguments(args):
        if not 0.05 <= args.every <= 86_400:
            raise SmartpruneError(f"--every {args.every:g}: give the seconds between two looks, from 0.05 to 86400")
    config = Path(args.path) / CONFIG
    try:
        if args.wait and not config.is_file():
            tell(f"waiting for {config}")
            while not config.is_file():
                time.sleep(args.every)
        if not config.is_file():
            raise SmartpruneError(f"{args.path} holds no run (no {CONFIG}); add --wait if it is about to start")
        if args.once:
            print("\n".join(status_lines(read_snapshot(args.path), text.stdout_is_ascii())))
        else:
            follow(args.path, args.every)
    except KeyboardInterrupt:  # the way to stop watching
        tell("")
    return 0
