"""Exact-budget block pruning for PyTorch."""

from .block import Block
from .budget import blocks, macs, params
from .errors import SmartpruneError
from .methods import METHODS, Magnitude, Smart
from .plan import Plan, plan
from .pruner import Pruner, attach, bake
from .receipt import Receipt
from .report import report
from .topk import hard_topk, soft_topk
from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Block",
    "Magnitude",
    "Plan",
    "Pruner",
    "Receipt",
    "Smart",
    "SmartpruneError",
    "attach",
    "bake",
    "blocks",
    "hard_topk",
    "macs",
    "params",
    "plan",
    "report",
    "soft_topk",
    "verify",
]
