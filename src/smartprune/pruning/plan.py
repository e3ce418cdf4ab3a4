"""Plans: what would be pruned, what would not and why, and whether the budget can be met. The model is not changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import Tensor, nn

from .. import text
from ..budgets import table_unit
from ..core.block import Block
from ..core.budget import Budget, ExactCost, ResolvedBudget, as_share, block_macs, min_keep
from ..core.layers import Layer, Patterns, Skipped, find_layers
from ..core.observe import observe
from ..core.usage import measure as measure_usage
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..fields import MAX_TEXT, is_valid_name
from ..hardware.npu import NPU
from .expected import Expected, expect
from .plan_budget import cheapest, one_budget, resolve_budget, without_example
from .plan_text import plan_json, plan_line, plan_text

WIDTH = 100


@dataclass(frozen=True, eq=False)
class Plan:
    """What pruning a model would remove, keep and skip. Made by :func:`plan`; ``print`` shows it as a table.

    Attributes:
        block: The size of a block.
        layers: The layers to prune, in the order of the model.
        skipped: The layers that are left out, each with its ``name`` and ``reason``.
        budget: The budget, or None.
        resolved: The budget for these layers: the cost of every block, and the limit.
        floor: The smallest share of its blocks that every layer keeps, or None.
        min_keep: The smallest number of blocks of every layer, int64 [layers], or None.
        model_params: Parameters of the whole model.
        uses: How often each weight of a layer is used, by layer name. None without an example.
        model_macs: MACs of the whole model for one sample. None without an example.
        not_counted: Operators that ran and whose MACs are not known. None without an example.
        expected: What the budget would leave: MACs, bytes, NPU cycles and time on a CPU. None without a budget that can be met, and
            in the plan of a pruner.

    Examples:
        >>> import smartprune as sp
        >>> p = sp.plan(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), block=(4, 4), sparsity=0.5)
        >>> p.feasible, p.n, p.keep
        (True, 4, 2)
    """

    block: Block
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    budget: Budget | None
    resolved: ResolvedBudget | None
    floor: Fraction | None  # the least share of its blocks that each layer keeps
    min_keep: Tensor | None  # [number of layers] int64; None without a floor
    model_params: int
    uses: Mapping[str, tuple[int, ...]] | None  # layer name -> how often each element is used
    model_macs: int | None
    not_counted: tuple[str, ...] | None = None  # operators that ran and whose MACs are not known; None without an example
    expected: Expected | None = None

    @property
    def n(self) -> int:
        """N, the number of blocks."""
        return sum(layer.n for layer in self.layers)

    @property
    def share(self) -> Fraction:
        """The share to remove; 0 without a budget."""
        return Fraction(0) if self.budget is None else as_share(self.budget.share, self.budget.kind)

    @property
    def cost(self) -> Tensor | None:
        """The cost of every block in a search, int64 [n]; None where every block costs one."""
        return None if self.resolved is None else self.resolved.cost

    @property
    def limit(self) -> int | None:
        """What the kept blocks may cost in a search; None without a budget."""
        return None if self.resolved is None else self.resolved.limit

    @property
    def exact(self) -> ExactCost | None:
        """The exact cost of a mask, of a budget that ``cost`` and ``limit`` only approximate."""
        return None if self.resolved is None else self.resolved.exact

    @property
    def keep(self) -> int | None:
        """How many blocks are kept; known beforehand only if every block costs one."""
        return self.limit if self.cost is None else None

    @property
    def total(self) -> int:
        """What all blocks together cost in a search, in the budget's unit."""
        return self.n if self.cost is None else int(self.cost.sum())

    @property
    def bound(self) -> tuple[int | None, int]:
        """What may be kept, and of how much, as the budget counts it."""
        if self.resolved is None:
            return None, self.n
        limit, total = self.resolved.bound
        return limit, self.n if total is None else total

    @property
    def unit(self) -> str:
        """What the budget counts: blocks, weights, MACs."""
        if self.budget is None or self.resolved is None:
            return "blocks"
        return self.budget.unit if self.resolved.table is None else table_unit(self.resolved.table)

    @property
    def params(self) -> int:
        """Weights in the layers to prune."""
        return sum(layer.params for layer in self.layers)

    @property
    def macs(self) -> int | None:
        """MACs of the layers to prune, for one sample; None without an example."""
        return None if self.uses is None else sum(self.layer_macs(layer) or 0 for layer in self.layers)

    def layer_macs(self, layer: Layer) -> int | None:
        """MACs of one layer, for one sample.

        Args:
            layer: One of ``layers``.

        Returns:
            The number of MACs, or None if the plan was made without an example.
        """
        return None if self.uses is None else int(block_macs(layer, self.uses[layer.name]).sum())

    @property
    def padding(self) -> Fraction:
        """Share of all block slots that hold no real weight."""
        return 1 - Fraction(self.params, sum(slots(layer, self.block) for layer in self.layers))

    def layer_padding(self, layer: Layer) -> Fraction:
        """The share of the block slots of one layer that hold no weight, because its channels do not divide by the block.

        Args:
            layer: One of ``layers``.

        Returns:
            A fraction in [0, 1).
        """
        return 1 - Fraction(layer.params, slots(layer, self.block))

    @property
    def feasible(self) -> bool:
        """Whether the budget and the floor can both be met."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why the budget and the floor cannot both be met, with the numbers; None if they can."""
        if self.resolved is None:
            return None
        need, limit = self._floor_cost(), self.bound[0] or 0
        if need > limit:
            return f"floor={float(self.floor or 0):g} needs {need:,} {self.unit}, the budget keeps {limit:,}"
        if self.cost is not None and self.resolved.limit < int(self.cost.min()):
            fixed = f"of which {self._fixed:,} do not depend on the blocks: " if self.exact is not None else ""
            return (
                f"the budget keeps {limit:,} of {self.bound[1]:,} {self.unit}, {fixed}"
                f"less than the smallest block ({int(self.cost.min()):,})"
            )
        return None

    @property
    def _fixed(self) -> int:
        """What the budget keeps independently of the blocks: where the linear approximation of an exact cost starts."""
        return 0 if self.limit is None else (self.bound[0] or 0) - self.limit

    def require(self) -> Plan:
        """Returns the plan if its budget can be met.

        Returns:
            The plan itself.

        Raises:
            SmartpruneError: The budget cannot be met. The message says how much can be removed.
        """
        if self.problem is not None and self.resolved is not None:
            smallest, total = 1 if self.cost is None else int(self.cost.min()), self.bound[1]
            removable = total - max(self._floor_cost(), smallest + self._fixed)
            most = math.floor(10_000 * Fraction(removable, self.resolved.whole or total)) / 10_000
            remedy = "lower floor, or remove less" if self.floor else "remove less"
            raise SmartpruneError(f"plan: {self.problem}; {remedy}: at most {most:g} of the {self.unit} can be removed")
        return self

    def blocks(self, model: nn.Module) -> Blocks:
        """The blocks of a model, with the budget of this plan.

        Args:
            model: The planned model, or a copy of it.

        Returns:
            The block vector that methods work on.

        Raises:
            SmartpruneError: The plan has no budget, or the model has other weights.
        """
        if self.resolved is None:
            raise SmartpruneError("plan: it has no budget; give sparsity= or budget= to plan()")
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for layer in self.layers:
            weight = parameters.get(layer.weight)
            if weight is None or tuple(weight.shape) != layer.grid.weight_shape:
                problem = (
                    "the model has no such weight" if weight is None else f"in the model it is {text.format_shape(weight.shape)}"
                )
                raise SmartpruneError(
                    f"plan: {layer.weight} is {text.format_shape(layer.grid.weight_shape)} in the plan, and {problem}; "
                    "plan the model that you prune"
                )
        return Blocks(model, self.layers, self.cost, self.resolved.limit, self.min_keep)

    def _floor_cost(self) -> int:
        """What the cheapest blocks that satisfy the floor cost."""
        if self.min_keep is None:
            return 0
        if self.exact is not None:
            return self.exact.of(self.exact.cheapest(self.min_keep))
        return int(self.min_keep.sum()) if self.cost is None else cheapest(self.layers, self.cost, self.min_keep)

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""
        return plan_json(self)

    def __repr__(self) -> str:
        return f"<Plan: {plan_line(self)}{'' if self.feasible else '; it cannot be met'}>"

    def __str__(self) -> str:
        return plan_text(self, WIDTH)


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
    npu: NPU | None = None,
    measure: bool = False,
) -> Plan:
    """Lists what pruning a model would remove, keep and skip, before any training. The model does not change.

    With a budget, it also says what to expect: the MACs, the size, the cycles on an NPU and the speed-up on a CPU if the blocks
    with the smallest weights were removed now. A search chooses other blocks, so its figures differ.

    A budget that cannot be met does not raise: ``feasible`` and ``problem`` of the plan say so, and :meth:`Plan.require` raises.

    Args:
        model: The model to prune.
        block: The size of a block, such as ``(16, 8)`` or ``"16x8"``: output channels, input channels, then the kernel.
        sparsity: The share of the blocks to remove, in [0, 1).
        budget: Any other budget, such as ``macs(0.5, example=x)``. Give ``sparsity`` or ``budget``, not both. With neither, the
            plan only lists the blocks.
        floor: The smallest share of its blocks that every layer keeps.
        include: Layers to prune although they are skipped by default: a glob of names such as ``"head.*"``, a layer type, or a
            list.
        skip: Layers to leave out, in the same form. It takes precedence over ``include``.
        example: One input of the model: a tensor, or a tuple or dictionary of arguments. With it, MACs are counted, and the
            layers that are skipped by default are found by what the model does with each weight. Without it, they are found by
            name and position.
        npu: The machine whose cycles are expected. Defaults to the machine of the budget, or else to ``NPU.edge()``.
        measure: Whether to time the model on this CPU, dense and with these blocks removed. Takes a few seconds.

    Returns:
        The plan. ``print`` shows it as a table.

    Raises:
        SmartpruneError: No layer can be pruned, a pattern matches no layer, or an argument is out of range.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 20, 1), nn.Flatten(), nn.Linear(20, 10))
        >>> p = sp.plan(model, block=(4, 4), sparsity=0.75)
        >>> p.n, p.keep, [layer.name for layer in p.layers]
        (10, 3, ['1'])
        >>> p.skipped[0].reason
        'stem: reads the image (3 channels)'
        >>> sp.plan(model, block=(4, 4), sparsity=0.95, floor=0.5).problem
        'floor=0.5 needs 5 blocks, the budget keeps 1'
        >>> p.expected.kept  # the blocks that the weights of now would keep
        {'1': 3}
    """
    if npu is not None and not isinstance(npu, NPU):
        raise SmartpruneError(f"plan: npu is a {type(npu).__name__}; give an NPU, such as smartprune.NPU.edge()")
    planned = make_plan(model, block, sparsity, budget, floor=floor, include=include, skip=skip, example=example)
    budget_npu = getattr(planned.budget, "npu", None)
    machine = npu if npu is not None else budget_npu if isinstance(budget_npu, NPU) else NPU.edge()
    used = getattr(budget, "example", None) if example is None else example
    return replace(planned, expected=expect(planned, model, used, machine, measure))


def make_plan(
    model: nn.Module,
    block: Block | str | Sequence[int | None],
    sparsity: float | None,
    budget: Budget | None,
    *,
    floor: float | None,
    include: Patterns,
    skip: Patterns,
    example: object,
) -> Plan:
    """The plan without expectations, which a pruner does not need."""
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"plan: model is a {type(model).__name__}; give a torch.nn.Module")
    budget = one_budget(sparsity, budget)
    block = Block.of(block)
    budget_example = getattr(budget, "example", None)
    example = budget_example if example is None else example
    facts = None if example is None else observe(model, example)
    layers, skipped = find_layers(model, block, include, skip, facts)
    if not layers:
        raise SmartpruneError(_nothing_to_prune(model, skipped))
    for layer in layers:
        _check_name(layer)
    least = None if floor is None else min_keep(layers, floor)
    resolved = None if budget is None else resolve_budget(budget, model, layers, least)
    usage = None if example is None else measure_usage(model, example)
    return Plan(
        block=block,
        layers=layers,
        skipped=skipped,
        budget=without_example(budget),
        resolved=resolved,
        floor=None if floor is None else as_share(floor, "floor"),
        min_keep=least,
        model_params=count_params(model),
        uses=None if usage is None else {layer.name: usage.uses(layer) for layer in layers},
        model_macs=None if usage is None else usage.macs,
        not_counted=None if usage is None else usage.not_counted,
    )


def _nothing_to_prune(model: nn.Module, skipped: Sequence[Skipped]) -> str:
    names: dict[str, list[str]] = {}
    for layer in skipped:
        names.setdefault(layer.reason, []).append(layer.name)
    reasons = []
    for reason, layers in names.items():
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        reasons.append(f"{', '.join(layers[:3])}{more}: {reason}")
    why = "; ".join(reasons) or "it has no weights with two axes or more"
    return f"plan: nothing to prune in this {type(model).__name__} ({why}); include= adds layers"


def _check_name(layer: Layer) -> None:
    """Raises for a name that a receipt cannot store."""
    for name in (layer.name, layer.weight, layer.kind):
        if not is_valid_name(name):
            raise SmartpruneError(
                f"plan: the name of layer {text.shorten(name, WIDTH)!r} cannot be stored in a receipt; rename it to at most "
                f"{MAX_TEXT} printable characters, or leave the layer out with skip="
            )


def count_params(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once, lazy ones not at all."""
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.UninitializedParameter))


def slots(layer: Layer, block: Block) -> int:
    """Elements of the layer's blocks if each were a full block, as hardware stores them that supports only full blocks."""
    full = list(block.fit(len(layer.grid.axes)))
    if layer.transposed:
        full[0], full[1] = full[1], full[0]
    return layer.n * math.prod(axis.length if s is None else s for s, axis in zip(full, layer.grid.axes, strict=True))
