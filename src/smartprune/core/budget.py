"""Budgets: what a block costs and how much may be kept, in integers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..errors import SmartpruneError
from .hard import as_fraction
from .layers import Layer
from .usage import count_macs, count_uses

if TYPE_CHECKING:
    from ..hardware.cycles import Latency
    from ..hardware.npu import NPU

Kind = Literal["blocks", "params", "macs", "cycles"]


@dataclass(frozen=True)
class Budget:
    """A share to remove, and of what. Made by :func:`blocks`, :func:`params`, :func:`macs` and :func:`cycles`."""

    kind: Kind
    share: Fraction
    example: Any = None
    of: Literal["layers", "model"] = "layers"
    npu: NPU | None = None  # whose cycles they are

    def __str__(self) -> str:
        return f"{self.kind} {float(self.share):g}"

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> tuple[Tensor | None, int, Latency | None]:
        """Cost of every block (int64 [n]; None where every block costs one) and what may be kept in all; for cycles, which are no
        sum over blocks, these are near the truth, and the latency itself comes third."""
        n = sum(layer.n for layer in layers)
        if self.kind == "blocks":
            return None, keep_count(self.share, n), None
        sizes = [layer.grid.sizes() for layer in layers]
        if self.kind == "params":
            cost = torch.cat(sizes)
            return cost, math.floor((1 - self.share) * int(cost.sum())), None
        if self.kind == "cycles":
            if self.npu is None:
                raise SmartpruneError("cycles: there is no NPU whose cycles they are; make the budget by smartprune.cycles")
            return self.npu.budget(model, layers, self.share, self.example, self.of)
        uses = count_uses(model, layers, self.example)
        cost = torch.cat([block_macs(layer, uses[layer.name]) for layer in layers])
        total = int(cost.sum())
        if total == 0:
            raise SmartpruneError("macs: the example reaches none of the layers to prune; give an input of the model")
        limit = math.floor((1 - self.share) * total)
        if self.of == "model":
            fixed = count_macs(model, self.example) - total
            limit = math.floor((1 - self.share) * (total + fixed)) - fixed
            if limit < 0:
                most = math.floor(10_000 * Fraction(total - int(cost.min()), total + fixed)) / 10_000
                raise SmartpruneError(
                    f"macs({float(self.share):g}, of='model') cannot be met: layers that are not pruned take "
                    f"{fixed:,} of {total + fixed:,} MACs; at most {most:g} can be removed; prune more layers "
                    "(include=) or ask for less"
                )
        return cost, limit, None


def blocks(share: float) -> Budget:
    """Removes this share of all blocks: keeps exactly ``ceil((1 - share) * N)``."""
    return Budget("blocks", as_share(share, "blocks"))


def params(share: float) -> Budget:
    """Removes at least this share of the weights in the pruned layers, by less than one block more."""
    return Budget("params", as_share(share, "params"))


def macs(share: float, example: Any, of: Literal["layers", "model"] = "layers") -> Budget:
    """Removes at least this share of the multiply-accumulates, by less than one block more.

    ``example`` is one input of the model (a tensor, or a tuple or dict of arguments). The share is of the MACs of
    the layers that are pruned, or with ``of="model"`` of the whole model.
    """
    if of not in ("layers", "model"):
        raise SmartpruneError(f"macs: of={of!r}; it is 'layers' (those that are pruned) or 'model' (all of them)")
    return Budget("macs", as_share(share, "macs"), example, of)


def as_share(value: Any, where: str, meaning: str = "the share to remove") -> Fraction:
    """A share in [0, 1) as an exact number: 0.97 is read as 97/100, not as its binary neighbour."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = number and math.isfinite(value)
    if good:
        share = as_fraction(value)
        if 0 <= share < 1 and float(value) < 1:
            return share
    hint = f"; write {where}={float(value) / 100:g}" if good and 1 < value < 100 else ""
    wrong = "outside" if number else f"a {type(value).__name__} and no number in"
    raise SmartpruneError(f"{where}={value!r} is {wrong} [0, 1): it is {meaning}{hint}")


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
    """MACs of every block of a layer: real elements times how often each is used, int64 [n]."""
    sizes = layer.grid.sizes().reshape(len(uses), -1)
    return (sizes * torch.tensor(list(uses), device="cpu")[:, None]).reshape(-1)
