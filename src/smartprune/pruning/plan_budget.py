"""The budget of a plan: chosen from the arguments of ``plan``, checked, and resolved for the layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import text
from ..core.budget import Budget, ResolvedBudget, as_share, describe
from ..core.budget import blocks as blocks_budget
from ..core.layers import Layer
from ..errors import SmartpruneError


def one_budget(sparsity: float | None, budget: Budget | None) -> Budget | None:
    """The budget that was given, checked; ``sparsity`` stands for one in blocks."""
    if budget is not None and not isinstance(budget, Budget):
        raise SmartpruneError(
            f"plan: budget={text.show(budget)} is a {type(budget).__name__}; write sparsity=0.9 for a share of the blocks, or a "
            "budget such as smartprune.params(0.9) or smartprune.macs(0.5, example=x)"
        )
    if sparsity is not None and budget is not None:
        raise SmartpruneError(f"plan: sparsity={sparsity} and budget={describe(budget)} are both given; give one of them")
    if sparsity is not None:
        as_share(sparsity, "sparsity")  # so that an error names the argument
        return blocks_budget(sparsity)
    if budget is not None:
        if not isinstance(budget.kind, str) or re.fullmatch("[a-z_]{1,32}", budget.kind) is None:
            raise SmartpruneError(
                f"plan: a budget is of kind {budget.kind!r}; it must be a word of at most 32 lower-case letters, such as 'energy'"
            )
        as_share(budget.share, budget.kind)
    return budget


def resolve_budget(budget: Budget, model: nn.Module, layers: Sequence[Layer], floor: Tensor | None) -> ResolvedBudget:
    """Cost and limit of a budget, checked, because a budget may be the user's own."""
    resolved, n = budget.resolve(model, layers), sum(layer.n for layer in layers)
    where = f"plan: resolve() of the budget {budget.kind!r}"
    if not isinstance(resolved, ResolvedBudget):
        raise SmartpruneError(f"{where} returned a {type(resolved).__name__}; return a ResolvedBudget")
    if not isinstance(resolved.limit, int):
        raise SmartpruneError(f"{where} returned limit={resolved.limit!r}; it must be an integer")
    cost = resolved.cost
    if cost is None:
        return resolved
    if cost.dtype != torch.int64 or tuple(cost.shape) != (n,) or int(cost.min()) < 0:
        raise SmartpruneError(
            f"{where} returned a cost of {text.format_shape(cost.shape)} {cost.dtype}; it must be int64 with one entry, not "
            f"negative, for each of the {n} blocks"
        )
    if resolved.exact is not None and floor is not None:  # the floor fits if its exact cost does
        resolved = dataclasses.replace(resolved, limit=max(resolved.limit, cheapest(layers, cost, floor)))
    return resolved


def without_example(budget: Budget | None) -> Budget | None:
    """The budget without its example, which may be large and is not needed any more."""
    example = getattr(budget, "example", None)
    if example is not None and dataclasses.is_dataclass(budget) and not isinstance(budget, type):
        return dataclasses.replace(budget, example=None)
    return budget


def cheapest(layers: Sequence[Layer], cost: Tensor, counts: Tensor) -> int:
    """The least that so many blocks of each layer cost."""
    pairs = zip(layers, counts.tolist(), strict=True)
    return sum(int(cost[layer.start : layer.stop].sort().values[:count].sum()) for layer, count in pairs)
