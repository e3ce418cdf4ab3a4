"""Copies of a model, such as EMA copies, that follow its pruner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.kinds import is_masked
from ..core.sharding import reshard
from ..errors import SmartpruneError
from .hold import hold_plain_copy
from .lookup import find_pruner
from .state import SearchState

if TYPE_CHECKING:
    from .pruner import Pruner


def apply_to(pruner: Pruner, other: nn.Module) -> None:
    """Gives a copy of the model the mask, the temperature and the phase of a pruner."""
    if not isinstance(other, nn.Module):
        raise SmartpruneError(f"pruner.apply_to(): {type(other).__name__} is not a model; give a copy of the model")
    of_copy = find_pruner(other)
    if of_copy is pruner:
        raise SmartpruneError("pruner.apply_to(): this is the model that the pruner is attached to; give a copy of it")
    if of_copy is None:
        other = unwrap_copy(pruner.search, other)
    hard = pruner.search.hard
    if hard is not None and (pruner.phase == "baked" or of_copy is None):
        reshard(other)
        weights = pruner.plan.blocks(other).weights if of_copy is None else of_copy.blocks.weights
        pruner.search.multiplier.multiply_(hard.to(torch.float32), weights)
        if of_copy is None:
            hold_plain_copy(weights, pruner.search.multiplier, hard)
            return
    if of_copy is None:
        masked = {name for layer in pruner.plan.layers for name, _ in layer.sites}
        if shared := [name for name, module in other.named_modules() if name in masked and is_masked(module)]:
            raise SmartpruneError(
                f"pruner.apply_to(): {shared[0]} belongs to a pruner already: the model is not a copy, but shares this layer; "
                "give a copy (copy.deepcopy)"
            )
        with torch.inference_mode(False):  # the state of the copy is written to later
            of_copy = type(pruner)(other, pruner.method, pruner.plan, pruner.steps, pruner.search.seed)
    of_copy.load_state_dict(pruner.state_dict())


def unwrap_copy(search: SearchState, copy: nn.Module) -> nn.Module:
    """The copy of the model inside a wrapper such as AveragedModel."""
    module: Any = copy
    while module is not None:
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if all(layer.weight in names for layer in search.plan.layers):
            return module  # type: ignore[no-any-return]
        module = module._modules.get("module", module._modules.get("_orig_mod"))
    raise SmartpruneError(
        f"pruner.apply_to(): this {type(copy).__name__} is not a copy of the model: {search.plan.layers[0].weight!r} or another "
        "pruned weight is missing; give a copy of the model"
    )
