"""Checks of how a pruner is used. Each one raises where the search would otherwise silently do nothing, or the wrong thing."""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from .. import text
from ..core.device import require_float64
from ..core.sharding import full_tensor, is_sharded
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..methods import METHODS
from ..methods.method import Method, capabilities
from ..topk import check_device
from . import optimizers
from .consensus import is_distributed, same_on_all_ranks
from .plan import Plan, slots

if TYPE_CHECKING:
    from .state import SearchState

TOO_WARM = 0.1  # if a soft mask is further than this from its hard form, the search has not decided
PATIENCE = 10  # steps of other optimizers that the optimizer of the scores may wait for its turn
LARGE_BLOCK = 16  # times the layer
MOST_UNSTEPPED = 200  # optimizer steps without a step of the pruner
MOST_REPLICATED = 1 << 28  # blocks; with FSDP every rank holds the state of all of them
REPLICATED_BYTES = 29  # of that state per block, for SMART without the state of the optimizer (records/scale-blocks)


# -- attach, and the model -----------------------------------------------------------------------------------------------


def require_arguments(model: nn.Module, method: Method | str, steps: int, seed: int) -> None:
    """The arguments of attach must have the right types."""
    if not hasattr(method, "rank"):
        raise SmartpruneError(
            f"attach: method={text.show(method)} is not a method; give its settings, such as smartprune.Smart(), or a name: "
            f"{', '.join(METHODS)}"
        )
    if isinstance(method, type):
        raise SmartpruneError(f"attach: method is the class {method.__name__}; give its settings, at least {method.__name__}()")
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"attach: model is a {type(model).__name__}; give a torch.nn.Module")
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
        raise SmartpruneError(f"attach: steps={steps!r}; give the length of the search as a number of optimizer steps, at least 1")
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise SmartpruneError(f"attach: seed={seed!r}; give an integer")


def require_values(blocks: Blocks) -> None:
    """Weights must have finite values that can be trained when the pruner is attached."""
    bad: list[str] = []
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        if weight.is_meta:
            raise SmartpruneError(f"attach: {layer.weight} is on the meta device and has no values; load them before you attach")
        if weight.is_inference():
            raise SmartpruneError(
                f"attach: {layer.weight} was created in inference_mode and cannot train; create or load the model outside of it"
            )
        bad += [] if bool(full_tensor(weight.detach()).isfinite().all()) else [layer.name]
    if bad:
        raise SmartpruneError(
            f"attach: the weights of {bad[0]} ({len(bad)} of {len(blocks.layers)} layers) contain NaN or infinity; load finite "
            "weights before you attach"
        )


def require_capable_device(search: SearchState) -> None:
    """A method that reads whole weights cannot work with parts of them, and one that computes in float64 needs such numbers."""
    if search.is_sharded and search.capabilities.needs_whole_weights:
        name = search.method.name
        raise SmartpruneError(f"attach: {name} needs whole weights, and FSDP has split them; use DDP, or another method")
    if search.is_sharded and search.blocks.n > MOST_REPLICATED:
        raise SmartpruneError(
            f"attach: {search.blocks.n:,} blocks of weights that FSDP has split; every rank holds the state of all blocks (about "
            f"{REPLICATED_BYTES} bytes each, and that of the optimizer), so at most {MOST_REPLICATED:,} are allowed; give a larger "
            "block, or prune fewer layers (include=, skip=)"
        )
    if search.capabilities.needs_float64 or search.plan.cost is not None:
        others = [name for name, method in METHODS.items() if not capabilities(method()).needs_float64]
        remedy = f"train on a CPU or a CUDA GPU, or use sparsity= with one of these methods: {', '.join(others)}"
        require_float64(search.blocks.device, "attach", remedy)


def require_sharded_before_attach(search: SearchState) -> None:
    if is_sharded(search.blocks.layer_weight(0)) and not search.is_sharded:
        raise SmartpruneError(
            "the weights were sharded by FSDP after attach, and the scores with them, but every rank needs all scores; call "
            "fully_shard first, then attach"
        )


def require_blocks_that_fit(plan: Plan) -> None:
    """Blocks that are much larger than every layer would remove whole kernel positions of layers, and nothing smaller."""
    if all(slots(layer, plan.block) >= LARGE_BLOCK * layer.params for layer in plan.layers):
        largest = max(plan.layers, key=lambda layer: layer.params)
        raise SmartpruneError(
            f"attach: blocks of {plan.block} are at least {LARGE_BLOCK} times as large as every layer (the largest is "
            f"{largest.name}, {text.format_shape(largest.grid.weight_shape)}), so only whole layers could be removed; give a "
            "smaller block"
        )


def require_no_transform() -> None:
    """Inside of vmap, grad and other transforms of torch.func, tensors are not what kernels expect."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise SmartpruneError(
            "forward: the model runs in a transform of torch.func, such as vmap or grad, which a model with a pruner does not "
            "support; use torch.autograd, or bake a copy of the model and transform that"
        )


def require_unbaked(search: SearchState) -> None:
    if search.baked:
        raise SmartpruneError("pruner.step(): the model is baked, so no step is left; remove the call from the loop")


def require_shapes(search: SearchState, weights: Sequence[Tensor]) -> None:
    for layer, weight in zip(search.blocks.layers, weights, strict=True):
        if weight.shape != layer.grid.weight_shape and not search.is_sharded:
            raise SmartpruneError(
                f"{layer.weight} has shape {text.format_shape(weight.shape)}, but had {text.format_shape(layer.grid.weight_shape)} "
                "when the pruner was attached; change the model before you attach"
            )


def require_scores(search: SearchState, call: str) -> None:
    """The scores must still be part of the model."""
    if not search.has_scores():
        raise SmartpruneError(
            f"pruner.{call}(): the scores are no longer part of the model (was its last module replaced after attach?); change "
            "the model before you attach"
        )


# -- the optimizer --------------------------------------------------------------------------------------------------------


def require_trained(search: SearchState) -> None:
    """The scores must move when other parameters do, at the first step and later, since optimizers may be replaced."""
    _require_order(search)
    if not search.trained:
        return
    scores = search.parameters()
    if not all(parameter.requires_grad for parameter in scores):
        raise SmartpruneError(
            "pruner.step(): the scores do not require grad, so the search cannot learn; call requires_grad_(True) on them"
        )
    moved, seen = _moved_parameters(search), search.seen
    if moved.issuperset(map(id, scores)):
        seen.scores_trained, seen.steps_missed = True, 0
        return
    if moved.isdisjoint(map(id, search.model.parameters())):
        return
    seen.steps_missed += 1
    known = optimizers.have_stepped(scores) if seen.scores_trained else optimizers.have_owners(scores)
    if known and seen.steps_missed < PATIENCE:
        return  # optimizers may take turns
    raise SmartpruneError(
        f"pruner.step(): the optimizer trains the weights but not the scores{', which were trained before' * seen.scores_trained}; "
        "after attach, call optimizer.add_param_group(pruner.param_group()), or create the optimizer after attach"
    )


def _require_order(search: SearchState) -> None:
    """One step of the pruner belongs to one step of the optimizer, and follows it.

    A gradient scaler may skip a step of the optimizer, but not the forward pass. After a forward pass and a backward pass the
    optimizer steps, so a forward pass between the two steps is in the wrong place.
    """
    seen, steps = search.seen, optimizers.step_count()
    if seen.replays:
        return
    if steps == seen.last_step:
        if seen.forward is None and seen.optimizer_stepped:
            raise SmartpruneError(
                "pruner.step(): called twice after one optimizer step, so the search would end too early; call it once after each "
                "optimizer.step()"
            )
        return
    seen.optimizer_stepped = True
    seen.early = seen.early + 1 if seen.forward == steps else 0
    if seen.early >= PATIENCE:
        raise SmartpruneError(
            "pruner.step(): called between the forward pass and optimizer.step(), so every check and the final mask are one step "
            "late; call it directly after optimizer.step()"
        )


def require_steps(search: SearchState) -> None:
    """A search must advance while the model trains."""
    idle = optimizers.step_count() - search.seen.last_step
    if idle < MOST_UNSTEPPED or search.hard is not None or search.seen.replays or not _has_moved(search):
        return
    raise SmartpruneError(
        f"forward: the optimizers took {idle} steps since the last pruner.step(), so the search stays at step {search.count} of "
        f"{search.steps}; call pruner.step() after each optimizer.step()"
    )


def _moved_parameters(search: SearchState) -> set[int]:
    """The ids of the parameters that optimizers have stepped on since the last step of the pruner."""
    stepped = optimizers.stepped_since(search.seen.last_step)
    return {id(p) for optimizer in stepped for group in optimizer.param_groups for p in group["params"]}


def _has_moved(search: SearchState) -> bool:
    """Whether any parameter of the model was stepped on. It was not if a gradient scaler skipped the step."""
    return not _moved_parameters(search).isdisjoint(map(id, search.model.parameters()))


def require_method_inputs(search: SearchState) -> None:
    """What the method learns from, a penalty or gradients, must have been there in this step."""
    name = type(search.method).__name__
    if hasattr(search.method, "penalty") and not search.penalty_called:
        raise SmartpruneError(
            f"pruner.step(): {name} controls sparsity through the loss, but pruner.penalty() was not called in this step; add it "
            "to the loss: loss = criterion(model(x), y) + pruner.penalty()"
        )
    search.penalty_called = False
    if search.calibration is not None and not search.calibration.gradients.seen:
        raise SmartpruneError(
            f"pruner.step(): {name} reads gradients, but no backward pass reached the pruned layers in this step; call "
            "loss.backward() before pruner.step()"
        )


# -- other ranks ----------------------------------------------------------------------------------------------------------


def require_agreement(search: SearchState) -> None:
    """At the first optimizer step every rank takes over the state of rank 0.

    DDP makes weights equal when it wraps a model, which is after attach. From then on the scores are equal, or never will be.
    """
    if search.seen.ranks_agree or not is_distributed() or not _has_moved(search):
        return
    search.seen.ranks_agree = True
    device = search.blocks.device
    require_equal_plans(search, device)
    position = torch.tensor([search.count, search.steps, search.hard is not None], dtype=torch.float64, device=device)
    if not same_on_all_ranks(position):
        raise SmartpruneError(
            f"pruner.step(): the ranks are at different steps of the search, this one at {search.count} of {search.steps}; load "
            "the state of the pruner on every rank: DistributedDataParallel shares weights and scores, but not the step"
        )
    if search.hard is not None:
        return
    for name, value in search.tensors.items():
        shared = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=device)
        torch.distributed.broadcast(shared, 0)
        search.tensors[name] = shared if isinstance(value, Tensor) else shared.item()
    if not all(same_on_all_ranks(parameter.detach()) for parameter in search.parameters()):
        raise SmartpruneError(
            "pruner.step(): the scores differ between ranks, because their gradients are not averaged: DistributedDataParallel "
            "only averages gradients of parameters that the model has when it is wrapped; attach first, then wrap (with "
            "find_unused_parameters=True if some parameters get no gradient, as with train_weights=False)"
        )


def require_equal_plans(search: SearchState, device: torch.device) -> None:
    """All ranks must prune the same layers with the same budget and method: their masks are exchanged as vectors."""
    described = repr(sorted((search.identity() | {"steps": 0}).items()))
    digest = hashlib.sha256(described.encode()).digest()
    parts = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, 16, 4)]
    if not same_on_all_ranks(torch.tensor(parts, dtype=torch.float64, device=device)):
        budget = "" if search.plan.budget is None else f" at {search.plan.budget.kind} {float(search.plan.share):g}"
        raise SmartpruneError(
            f"pruner.step(): the ranks prune differently; this one has {search.method.name} with {search.blocks.n:,} blocks of "
            f"{search.plan.block}{budget}; call attach with the same arguments on every rank"
        )


# -- finite numbers -------------------------------------------------------------------------------------------------------


def require_finite(search: SearchState) -> None:
    """The scores, and on the CPU their gradients, must be finite."""
    scores = search.parameters()
    if scores and scores[0].is_cuda:
        check_device(scores[0].device)
    elif not _is_finite(scores):
        _raise_diverged(search, "the scores")
    else:
        require_finite_gradients(search, "the gradient of the scores", [p.grad for p in scores if p.grad is not None])
    check_smallest_weight(search)


def check_smallest_weight(search: SearchState) -> None:
    """A loss that is NaN reaches all weights, so looking at the smallest is enough. (A GPU would have to be waited for.)"""
    weight = min(search.blocks.weights, key=Tensor.numel)
    if weight.device.type != "cuda" and not search.is_sharded and not _is_finite([weight]):
        require_finite_weights(search, "step")


def require_nearly_hard(search: SearchState) -> None:
    """The soft mask must be close to its hard form when it is frozen, for a method that measures the distance."""
    measure = getattr(search.method, "warmth", None)
    warmth = 0.0 if measure is None else measure(search.blocks, search.values())
    if warmth > TOO_WARM:
        raise SmartpruneError(
            f"pruner.freeze(): the search ends too warm: at temperature {search.tau:.3g} the soft mask is {warmth:.2f} away from "
            f"its hard form (at most {TOO_WARM} is allowed), so hardening would change the network; end at a lower "
            "temperature (end=), or call pruner.freeze(force=True) to harden anyway"
        )


def require_finite_gradients(search: SearchState, what: str, gradients: Sequence[Tensor]) -> None:
    """Gradients may be anything if a gradient scaler skipped the step."""
    if not _is_finite(gradients) and _has_moved(search):
        _raise_diverged(search, what)


def require_finite_weights(search: SearchState, call: str) -> None:
    blocks = search.blocks
    pairs = zip(blocks.layers, blocks.weights, strict=True)
    bad = [layer.name for layer, weight in pairs if not bool(full_tensor(weight.detach()).isfinite().all())]
    if bad:
        raise SmartpruneError(
            f"pruner.{call}(): the weights of {bad[0]} ({len(bad)} of {len(blocks.layers)} layers) contain NaN or infinity at step "
            f"{search.count}: the training diverged; lower the learning rate or clip gradients, and restart from the last good "
            "checkpoint"
        )


def _raise_diverged(search: SearchState, what: str) -> NoReturn:
    raise SmartpruneError(
        f"pruner.step(): {what} became NaN or infinite at step {search.count}, probably because the loss is not finite; lower the "
        "learning rate, or clip gradients (for the scores: Smart(clip=1.0))"
    )


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    return all(math.isfinite(float(tensor.detach().float().sum())) for tensor in tensors)
