"""Plans: what would be pruned, what would not and why, and whether the budget can be met. Nothing is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, get_args

from torch import Tensor, nn

from .. import text
from ..core.block import Block
from ..core.budget import Budget, Kind, as_share, block_macs, min_keep
from ..core.budget import blocks as blocks_budget
from ..core.layers import Layer, Patterns, Skipped, find_layers
from ..core.usage import count_macs, count_uses
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..fields import MAX_TEXT, is_valid_name

if TYPE_CHECKING:
    from ..hardware.cycles import Latency

WIDTH = 100
UNITS = {"blocks": "blocks", "params": "weights", "macs": "MACs", "cycles": "cycles"}


@dataclass(frozen=True, eq=False)
class Plan:
    """What :func:`plan` found. ``print`` shows it; ``require()`` insists on a budget that can be met."""

    block: Block
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    budget: Budget | None
    floor: Fraction | None  # the least share of its blocks that each layer keeps
    cost: Tensor | None = field(repr=False)  # [n] int64; None where every block costs one
    limit: int | None  # what the kept blocks may cost in all; None without a budget
    min_keep: Tensor | None = field(repr=False)  # [number of layers] int64; None without a floor
    model_params: int
    uses: Mapping[str, tuple[int, ...]] | None = field(repr=False)  # layer name -> how often each element is used
    model_macs: int | None
    latency: Latency | None = field(default=None, repr=False)  # of a budget in cycles, which cost and limit only come near

    @property
    def n(self) -> int:
        """N, the number of blocks."""
        return sum(layer.n for layer in self.layers)

    @property
    def keep(self) -> int | None:
        """How many blocks are kept; known beforehand for a budget in blocks only."""
        return self.limit if self.budget is not None and self.budget.kind == "blocks" else None

    @property
    def total(self) -> int:
        """What all blocks together cost, in the budget's unit."""
        return self.n if self.cost is None else int(self.cost.sum())

    @property
    def bound(self) -> tuple[int | None, int]:
        """What may be kept, and of how much, as the budget counts it."""
        return (self.limit, self.total) if self.latency is None else (self.latency.goal, self.latency.dense)

    @property
    def unit(self) -> str:
        """What the budget counts: blocks, weights, MACs."""
        return "blocks" if self.budget is None else UNITS.get(self.budget.kind, self.budget.kind)

    @property
    def params(self) -> int:
        """Weights in the layers to prune."""
        return sum(layer.params for layer in self.layers)

    @property
    def macs(self) -> int | None:
        """MACs of the layers to prune, for one sample; None without an example."""
        return None if self.uses is None else sum(layer_macs(layer, self.uses) for layer in self.layers)

    @property
    def padding(self) -> Fraction:
        """Share of all block slots that hold no real weight."""
        return 1 - Fraction(self.params, sum(slots(layer, self.block) for layer in self.layers))

    def layer_padding(self, layer: Layer) -> Fraction:
        """Share of one layer's block slots that hold no real weight."""
        return 1 - Fraction(layer.params, slots(layer, self.block))

    @property
    def feasible(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why floor and budget cannot both be met, with the numbers; None if they can."""
        if self.limit is None:
            return None
        need, goal = self._least(), self.bound[0] or 0
        if need > goal:
            return f"floor={float(self.floor or 0):g} needs {need:,} {self.unit}, the budget keeps {goal:,}"
        if self.cost is not None and self.limit < int(self.cost.min()):
            fixed = f"of which {self._fixed:,} do not depend on the blocks: " if self.latency is not None else ""
            return (
                f"the budget keeps {goal:,} of {self.bound[1]:,} {self.unit}, {fixed}"
                f"less than the smallest block ({int(self.cost.min()):,})"
            )
        return None

    @property
    def _fixed(self) -> int:
        """What the budget keeps and no block costs, about: of a latency, what the lines near it start at."""
        return 0 if self.limit is None else (self.bound[0] or 0) - self.limit

    def require(self) -> Plan:
        """Returns the plan itself, or raises if its budget cannot be met."""
        if self.problem is not None:
            smallest, whole = 1 if self.cost is None else int(self.cost.min()), self.bound[1]
            gone = whole - max(self._least(), smallest + self._fixed)
            if self.budget is not None and self.budget.kind == "macs" and self.budget.of == "model":
                whole = self.model_macs or whole  # what the share is of
            most = math.floor(10_000 * Fraction(gone, whole)) / 10_000
            cure = "lower floor, or remove less" if self.floor else "remove less"
            raise SmartpruneError(f"plan: {self.problem}; {cure}: at most {most:g} of the {self.unit} can go")
        return self

    def blocks(self, model: nn.Module) -> Blocks:
        """The blocks of ``model``, which is the planned model or a copy of it, with this plan's budget."""
        if self.limit is None:
            raise SmartpruneError("plan: it has no budget; give sparsity= or budget= to plan()")
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for layer in self.layers:
            weight = parameters.get(layer.weight)
            if weight is None or tuple(weight.shape) != layer.grid.weight_shape:
                given = "nothing" if weight is None else f"a weight of {text.format_shape(weight.shape)}"
                raise SmartpruneError(
                    f"plan: {layer.weight} is a weight of {text.format_shape(layer.grid.weight_shape)} in the plan, and the "
                    f"model has {given} there; plan the model that you prune"
                )
        return Blocks(model, self.layers, self.cost, self.limit, self.min_keep)

    def _least(self) -> int:
        """What the blocks that satisfy the floor cost: the cheapest."""
        if self.min_keep is None:
            return 0
        if self.latency is not None:
            return self.latency.of(self.latency.least(self.min_keep))
        if self.cost is None:
            return int(self.min_keep.sum())
        return cheapest(self.layers, self.cost, self.min_keep)

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        least = None if self.min_keep is None else self.min_keep.tolist()
        return {
            "block": str(self.block),
            "n": self.n,
            "budget": None if self.budget is None else {"kind": self.budget.kind, "share": str(self.budget.share)},
            "floor": None if self.floor is None else str(self.floor),
            "unit": self.unit,
            "total": self.bound[1],
            "limit": self.bound[0],
            "keep": self.keep,
            "feasible": self.feasible,
            "problem": self.problem,
            "params": self.params,
            "model_params": self.model_params,
            "macs": self.macs,
            "model_macs": self.model_macs,
            "padding": float(self.padding),
            "layers": [
                {
                    "name": layer.name,
                    "weight": layer.weight,
                    "kind": layer.kind,
                    "shape": list(layer.grid.weight_shape),
                    "grid": list(layer.grid.shape),
                    "parts": layer.grid.axes[0].parts,
                    "transposed": layer.transposed,
                    "blocks": layer.n,
                    "min_keep": None if least is None else least[i],
                    "params": layer.params,
                    "macs": None if self.uses is None else layer_macs(layer, self.uses),
                    "padding": float(self.layer_padding(layer)),
                }
                for i, layer in enumerate(self.layers)
            ],
            "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in self.skipped],
        }

    def __str__(self) -> str:
        header = ["layer", "kind", "weight", "grid", "blocks", "weights", "padding"]
        rows = [
            [
                layer.name,
                layer.kind,
                text.format_shape(layer.grid.weight_shape),
                text.format_shape(layer.grid.shape),
                f"{layer.n:,}",
                f"{layer.params:,}",
                text.percent(slots(layer, self.block) - layer.params, slots(layer, self.block)),
            ]
            for layer in self.layers
        ]
        if self.uses is not None:
            header.insert(6, "MACs")
            for row, layer in zip(rows, self.layers, strict=True):
                row.insert(6, f"{layer_macs(layer, self.uses):,}")
        align = "<<<<" + ">" * (len(header) - 4)
        lines = [f"Blocks of {self.block}", "", *text.table(header, rows, align, WIDTH, (0, 1))]
        if self.skipped:
            left = [(s.name, s.kind, text.format_shape(s.shape), s.reason) for s in self.skipped]
            lines += ["", *text.table(("not pruned", "kind", "weight", "reason"), left, "<<<<", WIDTH, (0, 1))]
        return "\n".join([*lines, "", *self._totals()])

    def _totals(self) -> list[str]:
        layers = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        lines = [
            f"blocks   {self.n:,} in {layers}, {100 * float(self.padding):.2f}% of their slots is padding",
            f"weights  {self.params:,} of {self.model_params:,} in the model",
        ]
        if self.macs is not None and self.model_macs is not None:
            lines.append(f"MACs     {self.macs:,} of {self.model_macs:,} in the model, for one sample")
        if self.min_keep is not None and self.floor is not None:
            lines.append(f"floor    every layer keeps {float(self.floor):g} of its blocks, {int(self.min_keep.sum()):,} in all")
        if self.budget is None or self.limit is None:
            return [*lines, "budget   none given"]
        bound = "exactly" if self.cost is None else "at most"
        limit, total = self.bound
        lines.append(f"budget   {self.budget} removed: keeps {bound} {limit:,} of {total:,} {self.unit}")
        return lines if self.problem is None else [*lines, f"problem  {self.problem}"]


def plan(
    model: nn.Module,
    block: Block | str | Sequence[int | None] = (16, 8),
    sparsity: float | None = None,
    budget: Budget | None = None,
    *,
    floor: float | None = None,
    include: Patterns = (),
    skip: Patterns = (),
    example: object = None,
) -> Plan:
    """What pruning ``model`` to a budget would touch, keep and cost, before any training.

    ``sparsity`` is the share of blocks to remove, ``budget`` any other budget; with neither, the plan only shows the
    blocks. ``floor`` is the least share of its blocks that every layer keeps. ``include`` and ``skip`` choose layers by
    glob or by type. ``example``, one input of the model, makes MACs known. A budget that cannot be met is reported
    (``feasible``, ``problem``), not raised; :meth:`Plan.require` raises.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 20, 1), nn.Flatten(), nn.Linear(20, 10))
    >>> p = plan(model, block=(4, 4), sparsity=0.75)
    >>> p.n, p.keep, [layer.name for layer in p.layers]
    (10, 3, ['1'])
    >>> p.skipped[0].reason
    'stem: reads the image (3 channels)'
    >>> plan(model, block=(4, 4), sparsity=0.95, floor=0.5).problem
    'floor=0.5 needs 5 blocks, the budget keeps 1'
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"plan: model is a {type(model).__name__}; give a torch.nn.Module")
    if sparsity is not None and budget is not None:
        raise SmartpruneError(f"plan: sparsity={sparsity} and budget={budget} are both given; give one of them")
    if budget is not None and not isinstance(budget, Budget):
        raise SmartpruneError(
            f"plan: budget={budget!r} is a {type(budget).__name__}; write sparsity=0.9 for a share of the blocks, or a "
            "budget such as smartprune.params(0.9) or smartprune.macs(0.5, example=x)"
        )
    if budget is not None and budget.kind not in get_args(Kind):
        raise SmartpruneError(f"plan: unknown budget {budget.kind!r}; it is one of: {', '.join(get_args(Kind))}")
    if sparsity is not None:
        as_share(sparsity, "sparsity")  # so that a wrong number is named as it was given
        budget = blocks_budget(sparsity)
    block = Block.of(block)
    layers, skipped = find_layers(model, block, include, skip)
    if not layers:
        names: dict[str, list[str]] = {}
        for s in skipped:
            names.setdefault(s.reason, []).append(s.name)
        listed = {
            reason: ", ".join(found[:3]) + (f" and {len(found) - 3} more" * (len(found) > 3)) for reason, found in names.items()
        }
        reasons = "; ".join(f"{found}: {reason}" for reason, found in listed.items()) or "it has no weights with two axes or more"
        raise SmartpruneError(f"plan: nothing to prune in this {type(model).__name__} ({reasons}); include= brings layers in")
    for layer in layers:
        _check_name(layer)
    least = None if floor is None else min_keep(layers, floor)
    cost, limit, latency = (None, None, None) if budget is None else budget.resolve(model, layers)
    if limit is not None and cost is not None and least is not None and latency is not None:
        limit = max(limit, cheapest(layers, cost, least))  # these only come near: a floor that the latency allows fits them too
    if example is None and budget is not None:
        example = budget.example
    uses = None if example is None else count_uses(model, layers, example)
    return Plan(
        block=block,
        layers=layers,
        skipped=skipped,
        budget=None if budget is None else replace(budget, example=None),  # which may be large, and is needed no more
        floor=None if floor is None else as_share(floor, "floor"),
        cost=cost,
        limit=limit,
        min_keep=least,
        model_params=count_params(model),
        uses=uses,
        model_macs=None if example is None else count_macs(model, example),
        latency=latency,
    )


def _check_name(layer: Layer) -> None:
    """Refuses what a receipt could not hold."""
    for name in (layer.name, layer.weight, layer.kind):
        if not is_valid_name(name):
            raise SmartpruneError(
                f"plan: layer {text.shorten(name, WIDTH)!r} has a name that a receipt cannot hold: give it one of at most "
                f"{MAX_TEXT} characters, all of which print, or leave it alone by skip="
            )


def cheapest(layers: Sequence[Layer], cost: Tensor, counts: Tensor) -> int:
    """What so many blocks of each layer cost at the least."""
    pairs = zip(layers, counts.tolist(), strict=True)
    return sum(int(cost[layer.start : layer.stop].sort().values[:count].sum()) for layer, count in pairs)


def count_params(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once; lazy ones have none yet."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.UninitializedParameter))


def layer_macs(layer: Layer, uses: Mapping[str, tuple[int, ...]]) -> int:
    """MACs of one layer for one sample."""
    return int(block_macs(layer, uses[layer.name]).sum())


def slots(layer: Layer, block: Block) -> int:
    """Elements of the layer's blocks if each were a full block, as hardware that knows full blocks only stores them."""
    full = list(block.fit(len(layer.grid.axes)))
    if layer.transposed:
        full[0], full[1] = full[1], full[0]
    return layer.n * math.prod(axis.length if s is None else s for s, axis in zip(full, layer.grid.axes, strict=True))
