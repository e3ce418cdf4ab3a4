"""No silent no-op: what a pruner asks of its model, its optimizer and its other ranks before it goes on, and what it says if
that is not so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import text
from ..core.sharding import full_tensor, is_sharded
from ..core.vector import Blocks
from ..errors import SmartpruneError
from ..methods.method import Method, State
from ..topk import check_device
from . import watch
from .consensus import distributed, same_everywhere

PATIENCE = 10  # steps of others in which an optimizer that has the scores may wait for its turn
PREFIX = "smartprune_"  # names of trained tensors in the model, while it is attached


class Careful:
    """The part of a :class:`~smartprune.pruner.Pruner` that finds out how it is misused."""

    model: nn.Module
    method: Method
    blocks: Blocks
    steps: int
    count: int
    phase: str
    _sharded: bool
    _host: nn.Module
    _state: State
    _trained: list[str]
    _watched: watch.Watched | None
    _penalized: bool
    _proven: bool  # whether the scores were seen to be in an optimizer
    _missed: int  # steps since then in which other parameters moved and the scores did not
    _agreed: bool  # whether all ranks were seen to agree
    _last: int  # step of any optimizer before which everything was looked at
    _modules: dict[str, nn.Module]
    _edges: list[tuple[nn.Module, str, nn.Module]]

    def parameters(self) -> list[nn.Parameter]:
        """What the user's optimizer must train besides the weights."""
        return [self._host._parameters[PREFIX + name] for name in self._trained]  # type: ignore[misc]

    def _require_unsplit(self) -> None:
        if is_sharded(self.blocks.layer_weight(0)) and not self._sharded:
            raise SmartpruneError(
                "the weights were split (FSDP) after attach, and the scores with them; call fully_shard first, then attach: scores "
                "stay whole on every rank"
            )

    def _require_shapes(self, weights: Sequence[Tensor]) -> None:
        for layer, weight in zip(self.blocks.layers, weights, strict=True):
            if weight.shape != layer.grid.weight_shape and not self._sharded:
                raise SmartpruneError(
                    f"{layer.weight} is {text.format_shape(weight.shape)} now and was "
                    f"{text.format_shape(layer.grid.weight_shape)} when the pruner was attached; change the model before you attach"
                )

    def _require_attached(self, call: str) -> None:
        if not all(parent._modules.get(name) is child for parent, name, child in self._edges):
            self._edges = self._way(call)  # wrapped since (torch.compile of a part, say), or gone
        if any(PREFIX + name not in self._host._parameters for name in self._trained):
            raise SmartpruneError(
                f"pruner.{call}(): the scores are no longer part of the model (was its last module replaced after attach?); change "
                "the model before you attach"
            )

    def _way(self, call: str = "attach") -> list[tuple[nn.Module, str, nn.Module]]:
        """How the masked layers, and the module with the scores, are reached from the model: (parent, name, child)."""
        pairs = [(parent, *item) for parent in self.model.modules() for item in parent._modules.items()]
        way = [(parent, name, child) for parent, name, child in pairs if child is not None]
        inside = {id(self.model), *(id(child) for _, _, child in way)}
        gone = [name for name, module in self._modules.items() if id(module) not in inside]
        if gone:
            raise SmartpruneError(
                f"pruner.{call}(): {gone[0]} is no longer part of the model: it was taken out or replaced after attach, and what "
                "stands in its place would not be pruned; change the model before you attach"
            )
        wanted = {id(module) for module in self._modules.values()}
        found = []
        for parent, name, child in reversed(way):  # from the leaves up: a parent is wanted when a child is
            if id(child) in wanted:
                wanted.add(id(parent))
                found.append((parent, name, child))
        return found

    def _require_trained(self) -> None:
        """The scores must move when the other parameters do, at the first step and later: optimizers may be exchanged."""
        if not self._trained:
            return
        mine = self.parameters()
        if not all(parameter.requires_grad for parameter in mine):
            raise SmartpruneError(
                "pruner.step(): the scores do not require grad, so the search cannot learn; set requires_grad_(True)"
            )
        moved = self._moved()
        if moved.issuperset(map(id, mine)):
            self._proven, self._missed = True, 0
            return
        if moved.isdisjoint(map(id, self.model.parameters())):
            return
        self._missed += 1
        if self._proven and self._missed < PATIENCE and watch.known(mine):
            return  # optimizers may take turns
        raise SmartpruneError(
            f"pruner.step(): the optimizer trains the weights but not the scores{', which were trained before' * self._proven}; "
            "after attach, call optimizer.add_param_group(pruner.param_group()), or build the optimizer after attach"
        )

    def _require_agreement(self) -> None:
        """At the first step of an optimizer every rank takes the first rank's state: DDP makes weights equal when it wraps a model,
        which is after attach. From then on the scores are equal, or never will be."""
        if self._agreed or not distributed() or self._moved().isdisjoint(map(id, self.model.parameters())):
            return
        self._agreed = True
        place = torch.tensor([self.count, self.steps, self.phase == "frozen"], dtype=torch.float64, device=self.blocks.device)
        if not same_everywhere(place):
            raise SmartpruneError(
                f"pruner.step(): the ranks stand at different steps of the search, this one at {self.count} of {self.steps}; load "
                "the state of the pruner on every rank: DistributedDataParallel shares weights and scores, but not the step"
            )
        if self.phase == "frozen":
            return
        for name, value in self._state.items():
            shared = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=self.blocks.device)
            torch.distributed.broadcast(shared, 0)
            self._state[name] = shared if isinstance(value, Tensor) else shared.item()
        if not all(same_everywhere(parameter.detach()) for parameter in self.parameters()):
            raise SmartpruneError(
                "pruner.step(): the scores differ between ranks, since their gradients are not averaged: DistributedDataParallel "
                "averages those of the parameters that a model has when it is wrapped; attach first, then wrap (with "
                "find_unused_parameters=True where some get no gradient, as with train_weights=False)"
            )

    def _moved(self) -> set[int]:
        """The ids of what optimizers have stepped on since the last step of this pruner."""
        optimizers = watch.since(self._last)
        return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}

    def _require_penalty(self) -> None:
        """What a method learns from must have been there in this step."""
        if hasattr(self.method, "penalty") and not self._penalized:
            raise SmartpruneError(
                f"pruner.step(): {type(self.method).__name__} steers sparsity through the loss, and pruner.penalty() was not "
                "called in this step; add it to your loss: loss = criterion(model(x), y) + pruner.penalty()"
            )
        self._penalized = False
        if self._watched is not None and not self._watched.seen:
            raise SmartpruneError(
                f"pruner.step(): {type(self.method).__name__} reads gradients, and no backward pass reached the pruned layers in "
                "this step; call loss.backward() before pruner.step()"
            )

    def _require_finite(self) -> None:
        mine = self.parameters()
        if mine and mine[0].is_cuda:
            check_device(mine[0].device)
        elif not _finite(mine):
            self._diverged("the scores")
        else:
            self._require_finite_gradients("the gradient of the scores", [p.grad for p in mine if p.grad is not None])
        self._glance()

    def _glance(self) -> None:
        """A loss that is NaN reaches all weights: the smallest tells, at no cost. (On a GPU it would have to be waited for.)"""
        weight = min(self.blocks.weights, key=Tensor.numel)
        if weight.device.type != "cuda" and not self._sharded and not _finite([weight]):
            self._require_finite_weights("step")

    def _require_finite_gradients(self, what: str, gradients: Sequence[Tensor]) -> None:
        """Those of a step that a gradient scaler skipped may be anything: nothing moved."""
        if not _finite(gradients) and not self._moved().isdisjoint(map(id, self.model.parameters())):
            self._diverged(what)

    def _diverged(self, what: str) -> NoReturn:
        raise SmartpruneError(
            f"pruner.step(): {what} became NaN or infinite at step {self.count}; the loss is likely not finite: lower the learning "
            "rate, or clip gradients (those of the scores: Smart(clip=1.0))"
        )

    def _require_finite_weights(self, call: str) -> None:
        pairs = zip(self.blocks.layers, self.blocks.weights, strict=True)
        bad = [layer.name for layer, weight in pairs if not bool(full_tensor(weight.detach()).isfinite().all())]
        if bad:
            raise SmartpruneError(
                f"pruner.{call}(): the weights of {bad[0]} ({len(bad)} of {len(self.blocks.layers)} layers) hold NaN or infinity "
                f"at step {self.count}: the training diverged; lower the learning rate, or clip gradients, and start from the "
                "last good checkpoint"
            )


def require_values(blocks: Blocks) -> None:
    """Weights that a search can start from."""
    bad: list[str] = []
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        if weight.is_meta:
            raise SmartpruneError(f"attach: {layer.weight} is on the meta device and has no values; load them before you attach")
        if weight.is_inference():
            raise SmartpruneError(
                f"attach: {layer.weight} was made in inference_mode and cannot train; make the model, or load it, outside"
            )
        bad += [] if bool(full_tensor(weight.detach()).isfinite().all()) else [layer.name]
    if bad:
        raise SmartpruneError(
            f"attach: the weights of {bad[0]} ({len(bad)} of {len(blocks.layers)} layers) hold NaN or infinity; load sound ones "
            "before you attach"
        )


def sound(state: dict[str, Any], n: int) -> bool:
    """Whether a state has all its parts, of the kinds that they have to be."""
    if not isinstance(state.get("tensors"), dict) or not all(isinstance(value, Tensor) for value in state["tensors"].values()):
        return False
    if not isinstance(state.get("floats"), dict) or not all(isinstance(state.get(name), int) for name in ("seed", "count")):
        return False
    vectors = [state.get(name, ...) for name in ("mask", "side")]
    fits = all(value is None or (isinstance(value, Tensor) and tuple(value.shape) == (n,)) for value in vectors)
    measured = state.get("measured")
    fits = fits and (measured is None or (isinstance(measured, Tensor) and measured.dim() in (1, 2) and measured.shape[-1] == 3))
    return fits and bool(state["count"] >= 0)


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(math.isfinite(float(tensor.detach().float().sum())) for tensor in tensors)


def differing(theirs: Any, ours: Any) -> tuple[Any, Any]:
    """Two values for a message; of two lists the first entries that are not the same."""
    if not isinstance(theirs, list) or not isinstance(ours, list):
        return theirs, ours
    return next(pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1])
