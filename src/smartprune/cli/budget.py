"""The flags of budgets and of the layers that they apply to, shared by the commands that prune or plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..budgets import budget_fields, budget_names
from ..errors import SmartpruneError
from .common import BUDGET, Parser

if TYPE_CHECKING:
    from ..core.budget import Budget


def add_budget_flags(parser: Parser, example: str) -> None:
    """Adds the flags. ``example`` is added to the help of budgets that need an input to count."""
    budget = parser.group(BUDGET).add_mutually_exclusive_group()
    budget.add_argument("--sparsity", type=float, metavar="X", help="share of blocks to remove, in [0, 1)")
    budget.add_argument("--params", type=float, metavar="X", help="share of weights to remove")
    budget.add_argument("--macs", type=float, metavar="X", help=f"share of multiply-accumulates to remove{example}")
    budget.add_argument("--cycles", type=float, metavar="X", help=f"share of the cycles on an NPU to remove{example}")
    budget.add_argument("--budget", metavar="KIND=SHARE", help="any budget, such as params=0.9")
    parser.add_argument("--npu", metavar="NAME", help="small, edge, server, or a .json file with its settings (default: edge)")
    parser.add_argument(
        "--cost-table", metavar="FILE", help="costs for --budget costs=SHARE (.json or .csv), or times for latency=SHARE (.json)"
    )
    parser.add_argument("--floor", type=float, metavar="X", help="smallest share of its blocks that each layer keeps")
    parser.add_argument(
        "--include", action="append", metavar="GLOB", default=[], help="prune these layers although they are skipped by default"
    )
    parser.add_argument("--skip", action="append", metavar="GLOB", default=[], help="do not prune these layers")


def find_budget(args: argparse.Namespace, example: Any, measured: Path | None = None) -> Budget | None:
    """The budget from the flags, if there is one. ``measured`` is the file for its measurement, if the flags give none."""
    from ..training.config import make_budget, parse_budget

    budgets = [(name, getattr(args, name)) for name in budget_names() if getattr(args, name, None) is not None]
    if args.budget is not None:
        budgets = [parse_budget(args.budget)]
    fields = budget_fields(budgets[0][0]) if budgets else set()
    if "example" in fields and example is None:
        raise SmartpruneError(f"--{budgets[0][0]} needs the shape of one sample: add --input, such as --input 3x32x32")
    table = args.cost_table
    if table is None and measured is not None and "measured" in fields:
        table = str(measured)
    return make_budget(*budgets[0], example, args.npu or "edge", table) if budgets else None
