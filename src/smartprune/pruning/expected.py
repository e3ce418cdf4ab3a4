"""What a budget would leave, before any training: MACs, bytes, NPU cycles and time on a CPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..artifacts.counts import Count
from ..artifacts.pack import packed_sizes
from ..core.budget import BlockBudget, ParamBudget, block_macs
from ..core.kinds import is_masked
from ..core.layers import weight_name
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from ..hardware.npu import NPU
from ..runtime.speed import Speed, Speedup, expected_speedup, macs_left_for, measure_speed
from ..topk import hard_topk

if TYPE_CHECKING:
    from .plan import Plan

EVEN_BUDGETS = (BlockBudget.kind, ParamBudget.kind)  # the others fix the MACs or the cycles themselves


@dataclass(frozen=True)
class Expected:
    """What is left if the budget removes the blocks with the smallest weights, as the weights are now.

    A search chooses other blocks, so its MACs and its speed differ. Figures that are not known are None: without an example, only
    the sizes are.

    Attributes:
        kept: The blocks that are kept, by the name of the layer.
        macs: MACs of the whole model, for one sample.
        even_macs: MACs of the model that are left if every layer loses the same share of its blocks. None if the budget counts MACs
            or cycles.
        bytes: The size of a plain file, and of the packed file.
        cycles: Cycles on ``npu``, for one sample.
        npu: The machine of ``cycles``.
        speedup: The expected speed-up on a CPU with float32, from the share of MACs that is left, as ``low``, ``typical`` and
            ``high``. None for networks of fewer than 50 million MACs, whose time does not follow from their MACs.
        measured: The time on this CPU, if it was measured.
    """

    kept: Mapping[str, int]
    macs: Count | None
    even_macs: int | None
    bytes: Count | None
    cycles: Count | None
    npu: NPU
    speedup: Speedup | None
    measured: Speed | None = None
    pruned_macs: int | None = field(default=None, repr=False)  # of the layers to prune, before pruning

    def macs_for(self, speedup: float) -> float | None:
        """The share of a budget in MACs that is expected to make the model this many times faster on a CPU.

        Args:
            speedup: How many times faster than the dense model, above 1.

        Returns:
            The share for :func:`macs`, rounded up to two digits. None if it cannot be reached, or if ``speedup`` is not known.
        """
        if not speedup > 1:
            raise SmartpruneError(f"macs_for: speedup={speedup!r} must be above 1")
        if self.macs is None or self.speedup is None or not self.pruned_macs:
            return None
        left = macs_left_for(speedup)
        if left is None:
            return None
        share = math.ceil(100 * self.macs.total * (1 - left) / self.pruned_macs - 1e-9) / 100
        return share if share < 1 else None

    def to_json(self) -> dict[str, object]:
        """Plain data: numbers, strings, lists and dictionaries."""

        def count(value: Count | None) -> object:
            return None if value is None else value.to_json()

        return {
            "assumes": "the blocks with the smallest mean |w| are removed",
            "kept": dict(self.kept),
            "model_macs": count(self.macs),
            "even_model_macs": self.even_macs,
            "bytes": count(self.bytes),
            "cycles": count(self.cycles),
            "npu": self.npu.to_json(),
            "cpu_speedup": None if self.speedup is None else self.speedup._asdict(),
            "cpu_measured": None if self.measured is None else {**asdict(self.measured), "speedup": self.measured.speedup},
            "macs_budget_for": {f"{times}x": self.macs_for(times) for times in (2, 3, 4)},
        }


def expect(planned: Plan, model: nn.Module, example: Any, npu: NPU, measure: bool = False) -> Expected | None:
    """The expectation of a plan. None without a budget that can be met, or if the weights have no values to rank."""
    if planned.resolved is None or not planned.feasible or not _has_values(planned, model):
        return None
    mask = smallest_removed(planned, model)
    if mask is None:
        return None
    state = masked_state(planned, model, mask)
    macs = even = pruned_macs = None
    if planned.uses is not None and planned.model_macs is not None:
        costs = torch.cat([block_macs(layer, planned.uses[layer.name]) for layer in planned.layers])
        pruned_macs = int(costs.sum())
        fixed = planned.model_macs - pruned_macs
        macs = Count(planned.model_macs, fixed + int(costs[mask].sum()))
        if planned.budget is not None and planned.budget.kind in EVEN_BUDGETS:
            even = fixed + round((1 - planned.share) * pruned_macs)
    out = Expected(
        kept={layer.name: int(mask[layer.start : layer.stop].sum()) for layer in planned.layers},
        macs=macs,
        even_macs=even,
        bytes=_sizes(planned, model, state),
        cycles=None if example is None else _cycles(planned, model, state, example, npu),
        npu=npu,
        speedup=None if macs is None else expected_speedup(macs.kept, macs.total),
        pruned_macs=pruned_macs,
    )
    if not measure:
        return out
    if example is None:
        raise SmartpruneError("plan: measure=True runs the model; give example=one input of it")
    pruned = copy.deepcopy(model)
    pruned.load_state_dict(state)
    return replace(out, measured=measure_speed(model, pruned, example))


def smallest_removed(planned: Plan, model: nn.Module) -> Tensor | None:
    """The mask of the blocks with the largest mean absolute weight that the budget allows, bool [n] on the CPU."""
    blocks = planned.blocks(model)
    rank = blocks.mean(torch.abs).cpu()
    if not bool(rank.isfinite().all()):
        return None
    layer = blocks.layer.cpu()
    if planned.exact is not None:
        return planned.exact.best(rank, blocks.min_keep, None if blocks.min_keep is None else layer)
    cost = None if blocks.cost is None else blocks.cost.cpu()
    return hard_topk(rank, blocks.limit, cost, blocks.min_keep, layer)


def masked_state(planned: Plan, model: nn.Module, mask: Tensor) -> dict[str, Any]:
    """The state dict of the model with the removed blocks at zero. The model does not change."""
    state = dict(model.state_dict())
    for layer in planned.layers:
        weight = state[layer.weight].detach()
        kept = layer.grid.expand(mask[layer.start : layer.stop].to(weight.device))
        masked = torch.where(kept, weight, torch.zeros((), dtype=weight.dtype, device=weight.device))
        for site in layer.sites:  # tied weights have several names
            state[weight_name(*site)] = masked
    return state


def _has_values(planned: Plan, model: nn.Module) -> bool:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters.values()):
        return False
    weights = [parameters[layer.weight] for layer in planned.layers]
    if any(weight.is_meta or is_sharded(weight) for weight in weights):
        return False
    return not any(is_masked(module) for module in model.modules())


def _sizes(planned: Plan, model: nn.Module, state: dict[str, Any]) -> Count | None:
    try:
        return Count(*packed_sizes(state, planned.block, model))
    except SmartpruneError:  # weights that a packed file cannot store
        return None


def _cycles(planned: Plan, model: nn.Module, state: dict[str, Any], example: Any, npu: NPU) -> Count | None:
    try:
        estimate = npu.estimate(model, example, planned.block, state)
    except SmartpruneError:  # no layer that the estimate covers
        return None
    return Count(estimate.dense.latency, estimate.latency)
