"""The guard: removed blocks of a frozen or baked model stay zero, whatever an optimizer's momentum or decay would
do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .masking import Masking


class _Held:
    """One weight that is held: its place in a masking, and the version at which it was last known to be clean."""

    def __init__(self, masking: Masking, index: int, mask: Tensor, version: int) -> None:
        self.masking, self.index, self.mask, self.version = masking, index, mask, version

    def clean(self, weight: Tensor) -> None:
        if weight._version != self.version:
            self.zero(weight)
            self.version = weight._version

    def zero(self, tensor: Tensor) -> None:
        self.masking.multiply_one_(self.mask, self.index, tensor)


_held = WeakTensorKeyDictionary()  # Tensor -> _Held
_known: WeakSet[Optimizer] = WeakSet()
_hooked = False


def hold(weights: Sequence[nn.Parameter], masking: Masking, mask: Tensor) -> None:
    """From now on these weights, whose removed blocks are zero, are cleaned after every step of a torch optimizer."""
    global _hooked
    if not _hooked:
        register_optimizer_step_post_hook(_after_step)
        _hooked = True
    for i, weight in enumerate(weights):
        _held[weight] = _Held(masking, i, masking.piece(mask, i), weight._version)
    _known.clear()


def release(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        _held.pop(weight, None)


def clean(weights: Sequence[nn.Parameter], masking: Masking, mask: Tensor) -> None:
    """Zeroes the removed blocks of every weight that was written to since it was last clean."""
    for i, weight in enumerate(weights):
        held = _held.get(weight)
        if held is None or held.masking is not masking:  # a copy, or a model that was loaded
            held = _held[weight] = _Held(masking, i, masking.piece(mask, i), -1)
        held.clean(weight)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _held:
        return
    first = optimizer not in _known
    for group in optimizer.param_groups:
        for weight in group["params"]:
            held = _held.get(weight)
            if held is None:
                continue
            held.zero(weight)
            held.version = weight._version
            if first:  # momentum of before the freeze: gradients of removed blocks are zero from now on
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape:
                        held.zero(value)
    _known.add(optimizer)


@torch.no_grad()
def is_held(weight: Tensor) -> bool:
    return weight in _held
