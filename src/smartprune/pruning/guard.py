"""The guard: removed blocks of a frozen or baked model stay zero, whatever momentum or decay would do to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.sharding import is_sharded
from .multiply import Masking


class _Group:
    """The held weights of one masking."""

    def __init__(self, masking: Masking, mask: Tensor) -> None:
        count = len(masking.grids)
        self.masking, self.mask = masking, mask
        self.weights: list[Callable[[], Tensor | None]] = [_gone] * count

    def zero(self, layers: Sequence[int], weights: Sequence[Tensor], quietly: bool = False) -> None:
        """``quietly``: autograd does not hear of it, since nothing changes unless somebody wrote past it as well."""
        if self.mask.device != weights[0].device:
            self.mask = self.mask.to(weights[0].device)
        self.masking.multiply_(self.mask, [weight.data for weight in weights] if quietly else weights, layers)


class _Work:
    """What is to be cleaned after a step of one optimizer: weights, by group."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params, self.epoch = params, _epoch
        self.groups: dict[int, tuple[_Group, list[int], list[Tensor]]] = {}
        for weight in params:
            group, i = _held.get(weight, (None, 0))
            if group is not None:
                _, layers, weights = self.groups.setdefault(id(group), (group, [], []))
                layers.append(i)
                weights.append(weight)

    def fits(self, params: list[Tensor]) -> bool:
        return (
            self.epoch == _epoch
            and len(params) == len(self.params)
            and all(a is b for a, b in zip(params, self.params, strict=True))
        )

    def same(self, other: _Work) -> bool:
        """Whether the same weights are cleaned with the same masks."""
        ours, theirs = ([(id(g), layers, [id(w) for w in ws]) for g, layers, ws in work.groups.values()] for work in (self, other))
        return ours == theirs


def _gone() -> Tensor | None:
    return None


_held = WeakTensorKeyDictionary()  # Tensor -> (_Group, number of the layer)
_groups: WeakValueDictionary[int, _Group] = WeakValueDictionary()  # by the id of the masking, which a group keeps alive
_works: WeakKeyDictionary[Optimizer, _Work] = WeakKeyDictionary()
_epoch = 0  # changes with what is held
_hooked = False


def hold(weights: Sequence[nn.Parameter], masking: Masking, mask: Tensor) -> None:
    """From now on these weights, whose removed blocks are zero, are cleaned after every step of a torch optimizer."""
    global _hooked
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True
    group = _groups[id(masking)] = _Group(masking, mask)
    for i, weight in enumerate(weights):
        _hold_one(group, i, weight)


def _hold_one(group: _Group, i: int, weight: Tensor) -> None:
    global _epoch
    _epoch += 1
    group.weights[i] = ref(weight)
    _held[weight] = (group, i)


def release(weights: Sequence[nn.Parameter]) -> None:
    global _epoch
    _epoch += 1
    for weight in weights:
        group, i = _held.pop(weight, (None, 0))
        if group is not None:
            group.weights[i] = _gone


def clean(weights: Sequence[nn.Parameter], masking: Masking, mask: Tensor) -> None:
    """Zeroes the removed blocks of every weight, whether it was written to or not: what is written through ``weight.data``
    (averages swapped in for an evaluation, say) leaves no trace."""
    group = _groups.get(id(masking))
    if group is None:  # a copy, or a model that was loaded
        group = _groups[id(masking)] = _Group(masking, mask)
    for i, weight in enumerate(weights):
        if group.weights[i]() is not weight:
            _hold_one(group, i, weight)
    group.zero(range(len(weights)), weights, quietly=not is_sharded(weights[0]))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _held:
        return
    params = [weight for group in optimizer.param_groups for weight in group["params"]]
    work, first = _works.get(optimizer), False
    if work is None or not work.fits(params):
        before, work = work, _Work(params)
        first = before is None or not work.same(before)  # else other weights came or went, such as those of a copy
        _works[optimizer] = work
    for group, layers, weights in work.groups.values():
        group.zero(layers, weights)
        if not first:
            continue
        # momentum of before the freeze: gradients of removed blocks are zero from now on
        for i, weight in zip(layers, weights, strict=True):
            for value in optimizer.state.get(weight, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    group.masking.multiply_one_(group.masking.piece(group.mask, i), i, value)


def is_held(weight: Tensor) -> bool:
    return weight in _held
