"""Budgets: what every block costs and what the kept blocks may cost in all, in integers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from .hard import as_fraction
from .layers import Layer
from .usage import measure

Scope = Literal["layers", "model"]


class InfeasibleBudgetError(SmartpruneError):
    """No choice of blocks meets the budget."""


class ExactCost(Protocol):
    """The cost of a mask, for a budget that is not a sum over blocks. It chooses the hard mask at the end of a search."""

    @property
    def limit(self) -> int:
        """What the layers may cost."""

    @property
    def total(self) -> int:
        """What they cost with every block."""

    def of(self, mask: Tensor) -> int:
        """The cost with the kept blocks ``mask``, bool [n]."""

    def best(self, rank: Tensor, floor: Tensor | None = None, layer: Tensor | None = None) -> Tensor | None:
        """The highest ranked blocks that cost no more than ``limit``, bool [n].

        ``floor`` holds the fewest blocks of each layer, and ``layer`` the layer of each block. None if the floor alone costs more
        than the limit.
        """

    def cheapest(self, floor: Tensor) -> Tensor:
        """The cheapest choice of ``floor`` blocks of each layer, bool [n]."""


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget for the layers of one model.

    With ``exact``, ``cost`` and ``limit`` are an approximation that a search can sum, and ``exact`` decides.
    """

    cost: Tensor | None  # of every block, int64 [n]; None where every block costs one
    limit: int  # what the kept blocks may cost in all
    exact: ExactCost | None = None
    whole: int | None = None  # what the share is a share of, if that is more than the cost of all blocks
    table: Mapping[str, object] | None = None  # short texts and numbers that describe where the costs come from, for receipts

    @property
    def bound(self) -> tuple[int, int | None]:
        """What may be kept, and of how much; None where every block costs one."""
        if self.exact is not None:
            return self.exact.limit, self.exact.total
        return self.limit, None if self.cost is None else int(self.cost.sum())

    def used(self, mask: Tensor) -> int:
        """What the kept blocks ``mask`` cost, bool [n]."""
        if self.exact is not None:
            return self.exact.of(mask)
        return int(mask.sum() if self.cost is None else self.cost[mask].sum())

    @staticmethod
    def from_share(cost: Tensor, share: float | Fraction) -> ResolvedBudget:
        """Removes at least this share of the total cost. A floating-point ``share`` is read as it is written."""
        return ResolvedBudget(cost, math.floor((1 - as_share(share, "share")) * int(cost.sum())))


@runtime_checkable
class Budget(Protocol):
    """The contract of a budget: a dataclass with a share to remove, what the share is of, and a cost for every block.

    Three more fields are optional: ``example``, one input of the model, with which the plan counts MACs; ``of``, ``"layers"`` or
    ``"model"``, which says whether the share is of the pruned layers or of the whole model; ``npu``, whose cycles are counted.

    Attributes:
        kind: Its name in receipts and in ``BUDGETS``, of lower-case letters and ``_``.
        unit: What it counts, in the plural and after a number: ``"MACs"``.
        label: What the share is a share of: ``"NPU cycles"``.
        share: The share to remove, in [0, 1).

    Examples:
        >>> import smartprune as sp
        >>> budget = sp.params(0.5)
        >>> isinstance(budget, sp.Budget), budget.kind, budget.unit
        (True, 'params', 'weights')
    """

    @property
    def kind(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def share(self) -> float | Fraction: ...
    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget: ...


def describe(budget: Budget) -> str:
    """``macs 0.5``: a budget in a message or a table."""
    return f"{budget.kind} {float(budget.share):g}"


def scope(budget: Budget) -> str:
    """Whether the share is of the pruned ``layers`` or of the whole ``model``."""
    return str(getattr(budget, "of", "layers"))


@dataclass(frozen=True)
class BlockBudget:
    """Made by :func:`blocks`."""

    share: Fraction
    kind: ClassVar[str] = "blocks"
    unit: ClassVar[str] = "blocks"
    label: ClassVar[str] = "blocks"

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        return ResolvedBudget(None, keep_count(self.share, sum(layer.n for layer in layers)))


@dataclass(frozen=True)
class ParamBudget:
    """Made by :func:`params`."""

    share: Fraction
    kind: ClassVar[str] = "params"
    unit: ClassVar[str] = "weights"
    label: ClassVar[str] = "weights"

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        return ResolvedBudget.from_share(torch.cat([layer.grid.sizes() for layer in layers]), self.share)


@dataclass(frozen=True)
class MacBudget:
    """Made by :func:`macs`."""

    share: Fraction
    example: Any = field(repr=False)
    of: Scope = "layers"
    kind: ClassVar[str] = "macs"
    unit: ClassVar[str] = "MACs"
    label: ClassVar[str] = "MACs"

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        usage = measure(model, self.example)
        cost = torch.cat([block_macs(layer, usage.uses(layer)) for layer in layers])
        total = int(cost.sum())
        if total == 0:
            raise SmartpruneError("macs: the example reaches none of the layers to prune; give an input of the model")
        if self.of == "layers":
            return ResolvedBudget.from_share(cost, self.share)
        whole = usage.macs
        fixed = whole - total
        limit = math.floor((1 - self.share) * whole) - fixed
        if limit < 0:
            most = math.floor(10_000 * Fraction(total - int(cost.min()), whole)) / 10_000
            raise InfeasibleBudgetError(
                f"macs({float(self.share):g}, of='model') cannot be met: layers that are not pruned take {fixed:,} of {whole:,} "
                f"MACs; at most {most:g} can be removed; prune more layers (include=) or remove less"
            )
        return ResolvedBudget(cost, limit, whole=whole)


def blocks(share: float) -> BlockBudget:
    """A budget in blocks: keeps exactly ``ceil((1 - share) * N)`` of the N blocks. ``sparsity=`` means the same.

    Args:
        share: The share of the blocks to remove, in [0, 1).

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1).

    Examples:
        >>> import smartprune as sp
        >>> sp.plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), block=(4, 4), budget=sp.blocks(0.75)).keep
        1
    """
    return BlockBudget(as_share(share, "blocks"))


def params(share: float) -> ParamBudget:
    """A budget in weights: removes at least this share of the weights of the pruned layers, and less than one block more.

    Args:
        share: The share of the weights to remove, in [0, 1).

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1).

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> sp.plan(model, block=(4, 4), budget=sp.params(0.75)).bound  # keep at most 16 of 64 weights
        (16, 64)
    """
    return ParamBudget(as_share(share, "params"))


def macs(share: float, example: Any, of: Scope = "layers") -> MacBudget:
    """A budget in multiply-accumulates: removes at least this share of the MACs, and less than one block more.

    Args:
        share: The share of the MACs to remove, in [0, 1).
        example: One input of the model: a tensor, or a tuple or dictionary of arguments. MACs are counted for one sample.
        of: ``"layers"``: the share is of the pruned layers. ``"model"``: it is of the whole model.

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1), or ``of`` is unknown.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(32, 4))
        >>> sp.plan(model, block=(4, 4), budget=sp.macs(0.5, example=torch.zeros(1, 8, 2, 2))).bound  # MACs
        (128, 256)
    """
    return MacBudget(as_share(share, "macs"), example, as_scope(of, "macs"))


def as_scope(of: Scope, where: str) -> Scope:
    if of not in get_args(Scope):
        raise SmartpruneError(f"{where}: of={of!r}; it is 'layers' (the pruned ones) or 'model' (all of them)")
    return of


def as_share(value: Any, where: str, meaning: str = "the share to remove") -> Fraction:
    """A share in [0, 1) as an exact number: 0.97 is read as 97/100, not as its binary neighbour."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    finite = number and math.isfinite(value)
    if finite:
        share = as_fraction(value)
        if 0 <= share < 1 and float(value) < 1:
            return share
    hint = f"; write {where}={float(value) / 100:g}" if finite and 1 < value < 100 else ""
    problem = "outside [0, 1)" if number else f"a {type(value).__name__}, not a number in [0, 1)"
    raise SmartpruneError(f"{where}={value!r} is {problem}: it is {meaning}{hint}")


def keep_count(share: Fraction, n: int) -> int:
    """``ceil((1 - share) * n)`` in exact arithmetic.

    >>> keep_count(as_share(0.97, "sparsity"), 200)        # floating point would say 7
    6
    """
    return math.ceil((1 - share) * n)


def min_keep(layers: Sequence[Layer], floor: float) -> Tensor:
    """The fewest blocks each layer keeps: ``n_l - floor((1 - floor) * n_l)``, int64 [number of layers]."""
    share = as_share(floor, "floor", "the least share of its blocks that each layer keeps")
    return torch.tensor([layer.n - math.floor((1 - share) * layer.n) for layer in layers], device="cpu")


def block_macs(layer: Layer, uses: Sequence[int]) -> Tensor:
    """MACs of every block of a layer: its real elements times how often each is used, int64 [n]."""
    sizes = layer.grid.sizes().reshape(len(uses), -1)
    return (sizes * torch.tensor(list(uses), device="cpu")[:, None]).reshape(-1)
