"""The registry of weights whose zero blocks stay zero. The optimizer hooks zero these blocks again after every step.

Weights are identified by object identity, and a deepcopy of a held weight is held, too. PyTorch has no hook for copies, so
``nn.Parameter.__deepcopy__`` is replaced once a weight is held. Models of :func:`smartprune.hold` also have marks (``hold.py``).
They find the weights again after pickling, or when modules get new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from .. import text
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from .multiply import BlockMultiplier


class ZeroMask:
    """The hard mask of one multiplier, and the weights whose removed blocks stay zero."""

    def __init__(self, multiplier: BlockMultiplier, mask: Tensor) -> None:
        self.multiplier, self.mask = multiplier, mask
        self.weights: list[Callable[[], Tensor | None]] = [_no_weight] * len(multiplier.grids)

    def __getstate__(self) -> dict[str, Any]:
        return {"multiplier": self.multiplier, "mask": self.mask}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["multiplier"], state["mask"])  # type: ignore[misc]

    def copy(self, memo: dict[int, Any]) -> ZeroMask:
        """The same mask for the weights of a copied model, one for each ``memo`` of ``copy.deepcopy``."""
        out: ZeroMask | None = memo.get(id(self))
        if out is None:
            out = memo[id(self)] = ZeroMask(self.multiplier, self.mask)
            memo.setdefault(id(memo), []).append(self)  # its id must stay taken, as in copy.deepcopy
        return out

    def apply(self, layers: Sequence[int], weights: Sequence[Tensor], bypass_autograd: bool = False) -> None:
        """Zeroes removed blocks. With ``bypass_autograd`` the version counters of the weights do not change: usually the blocks
        are zero already."""
        if self.mask.device != weights[0].device:
            self.mask = self.mask.to(weights[0].device)
        self.multiplier.multiply_(self.mask, [weight.data for weight in weights] if bypass_autograd else weights, layers)

    def apply_to_layer(self, layer: int, value: Tensor) -> None:
        """Zeroes the removed blocks of any tensor with the shape of a weight."""
        self.multiplier.multiply_layer_(self.multiplier.layer_mask(self.mask, layer), layer, value)

    def is_applied(self, layer: int, weight: Tensor) -> bool:
        """Whether the removed blocks of a weight are zero. Sharded weights are not checked: their ranks could disagree."""
        if is_sharded(weight):
            return True
        masked = weight.detach().clone()
        self.apply_to_layer(layer, masked)
        return torch.equal(masked, weight.detach())


class Mark(Protocol):
    """Finds the weights of a module that are held at zero."""

    def held(self) -> Iterable[tuple[Tensor, ZeroMask, int]]:
        """The current weights, each with its mask and the index of its layer there."""


class _Cleanup:
    """What is zeroed after a step of one optimizer: weights, grouped by mask."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.version = parameters, _held_version
        self.groups: dict[int, tuple[ZeroMask, list[int], list[Tensor]]] = {}
        for weight in parameters:
            mask, layer = _held.get(weight, (None, 0))
            if mask is not None:
                _, layers, weights = self.groups.setdefault(id(mask), (mask, [], []))
                layers.append(layer)
                weights.append(weight)

    def is_current(self, parameters: list[Tensor]) -> bool:
        return (
            self.version == _held_version
            and len(parameters) == len(self.parameters)
            and all(a is b for a, b in zip(parameters, self.parameters, strict=True))
        )

    def equals(self, other: _Cleanup) -> bool:
        """Whether both zero the same weights with the same masks."""
        return self._key() == other._key()

    def _key(self) -> list[tuple[int, list[int], list[int]]]:
        return [(id(mask), layers, [id(weight) for weight in weights]) for mask, layers, weights in self.groups.values()]


def _no_weight() -> Tensor | None:
    return None


_held = WeakTensorKeyDictionary()  # weight -> (ZeroMask, index of the layer)
_unchecked = WeakTensorKeyDictionary()  # weights of copies that no optimizer has stepped on yet
_masks: WeakValueDictionary[int, ZeroMask] = WeakValueDictionary()  # by id of the multiplier, which the mask keeps alive
_marks: WeakSet[Any] = WeakSet()
_cleanups: WeakKeyDictionary[Optimizer, _Cleanup] = WeakKeyDictionary()
_held_version = 0  # changes whenever _held does


def hold_zeros(weights: Sequence[Tensor], mask: ZeroMask) -> ZeroMask:
    """From now on the removed blocks of these weights, which are zero, are zeroed after every step of an optimizer."""
    for layer, weight in enumerate(weights):
        _hold(mask, layer, weight)
    return mask


def hold_frozen(weights: Sequence[Tensor], multiplier: BlockMultiplier, mask: Tensor) -> ZeroMask:
    """Holds the zeros of a frozen model, for :func:`zero_removed_blocks`."""
    zero_mask = _masks[id(multiplier)] = ZeroMask(multiplier, mask)
    return hold_zeros(weights, zero_mask)


def hold_copy(weight: Tensor, mask: ZeroMask, layer: int) -> None:
    """Holds a copy of a held weight. Before an optimizer first steps on it, its removed blocks must still be zero."""
    _hold(mask, layer, weight)
    _unchecked[weight] = True


def _hold(mask: ZeroMask, layer: int, weight: Tensor) -> None:
    global _held_version
    _held_version += 1
    nn.Parameter.__deepcopy__ = _deepcopy_parameter  # type: ignore[method-assign,assignment]
    _unchecked.pop(weight, None)
    mask.weights[layer] = ref(weight)
    _held[weight] = (mask, layer)


def release_zeros(weights: Iterable[Tensor]) -> None:
    """Lets the removed blocks of these weights train again."""
    global _held_version
    _held_version += 1
    for weight in weights:
        _unchecked.pop(weight, None)
        mask, layer = _held.pop(weight, (None, 0))
        if mask is not None:
            mask.weights[layer] = _no_weight


def hold_of(weight: Tensor) -> ZeroMask | None:
    """The mask by which a weight is held."""
    mask: ZeroMask | None = _held.get(weight, (None, 0))[0]
    return mask


def zero_removed_blocks(weights: Sequence[Tensor], multiplier: BlockMultiplier, mask: Tensor) -> ZeroMask:
    """Zeroes the removed blocks of every weight of a frozen model now.

    This includes weights that were written through ``weight.data`` (as when averages are swapped in for an evaluation), which
    leaves no trace in their version counters.
    """
    zero_mask = _masks.get(id(multiplier)) or hold_frozen(weights, multiplier, mask)  # a copied or loaded model has none
    for layer, weight in enumerate(weights):
        if zero_mask.weights[layer]() is not weight:
            _hold(zero_mask, layer, weight)
    zero_mask.apply(range(len(weights)), weights, bypass_autograd=not is_sharded(weights[0]))
    return zero_mask


_torch_deepcopy = nn.Parameter.__deepcopy__


def _deepcopy_parameter(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Replaces ``nn.Parameter.__deepcopy__``: a copy of a held weight is held."""
    is_new = id(self) not in memo
    out: nn.Parameter = _torch_deepcopy(self, memo)  # type: ignore[no-untyped-call]
    mask, layer = _held.get(self, (None, 0)) if is_new else (None, 0)
    if mask is not None:
        hold_copy(out, mask.copy(memo), layer)
    return out


# -- marks on modules -----------------------------------------------------------------------------------------------------


def add_mark(mark: Mark) -> None:
    """From now on the weights that the mark finds are held, also if a module replaces them."""
    global _held_version
    _held_version += 1
    _marks.add(mark)


def remove_mark(mark: Mark) -> None:
    _marks.discard(mark)


def _follow_marks() -> None:
    """Holds the weights of marked modules that are not held yet: loading with ``assign=True`` or FSDP replaced them."""
    for mark in list(_marks):
        for weight, mask, layer in mark.held():
            if weight not in _held and not weight.is_meta:
                hold_copy(weight, mask, layer)


# -- the steps of an optimizer --------------------------------------------------------------------------------------------


def prepare(optimizer: Optimizer) -> None:
    """Before a step: finds the weights of copies, and requires that their removed blocks are zero."""
    if not _marks and not _unchecked:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cleanup = _cleanups.get(optimizer)
    if cleanup is not None and cleanup.is_current(parameters):
        return
    _follow_marks()
    for weight in parameters:
        if _unchecked.pop(weight, None) is None:
            continue
        mask, layer = _held[weight]
        if not mask.is_applied(layer, weight):
            _unchecked[weight] = True
            raise SmartpruneError(
                f"optimizer.step(): a weight of shape {text.format_shape(weight.shape)} has values in blocks that are held at "
                "zero, because its model is a copy of a pruned model; to train all blocks, call smartprune.hold(model).remove()"
            )


def restore(optimizer: Optimizer) -> None:
    """After a step: zeroes the removed blocks of the weights that the optimizer trains."""
    if not _held:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cleanup, is_first = _cleanups.get(optimizer), False
    if cleanup is None or not cleanup.is_current(parameters):
        before, cleanup = cleanup, _Cleanup(parameters)
        is_first = before is None or not cleanup.equals(before)  # else only weights of other models were held or released
        _cleanups[optimizer] = cleanup
    for mask, layers, weights in cleanup.groups.values():
        mask.apply(layers, weights)
        if not is_first:
            continue
        # momentum from before the freeze; from now on the gradients of removed blocks are zero
        for layer, weight in zip(layers, weights, strict=True):
            for value in optimizer.state.get(weight, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    mask.apply_to_layer(layer, value)
