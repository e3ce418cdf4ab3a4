"""``hold``: keeps the zero blocks of any model at zero while the model trains further."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from .. import text
from ..artifacts.receipt import Receipt
from ..core.block import Axis, Block, Grid
from ..core.kinds import is_masked
from ..core.layers import Candidate, Layer, candidates
from ..core.occupancy import occupied
from ..core.sharding import full_tensor
from ..errors import SmartpruneError
from . import optimizers, zeros
from .multiply import BlockMultiplier
from .zeros import ZeroMask

MARK = "_smartprune_zeros"  # the attribute of a module whose weights are held
NAMES = 3  # names that a text lists


class Mark:
    """Stored in a module to find its held weights in copies, after pickling, and when the module gets new weights."""

    def __init__(self, module: nn.Module) -> None:
        self.layers: dict[str, tuple[ZeroMask, int]] = {}  # attribute -> mask, and the index of the layer there
        self._module: ReferenceType[nn.Module] = ref(module)
        zeros.add_mark(self)

    def held(self) -> Iterator[tuple[Tensor, ZeroMask, int]]:
        module = self._module()
        for attribute, (mask, layer) in self.layers.items() if module is not None else ():
            weight = module._parameters.get(attribute)  # type: ignore[union-attr]
            if weight is not None and tuple(weight.shape) == mask.multiplier.grids[layer].weight_shape:
                yield weight, mask, layer

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        out = Mark(copy.deepcopy(self._module(), memo))  # type: ignore[arg-type]
        out.layers = {attribute: (mask.copy(memo), layer) for attribute, (mask, layer) in self.layers.items()}
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizers.install()
        self.layers, self._module = state["layers"], ref(state["module"])
        zeros.add_mark(self)


def _mark(model: nn.Module, layers: Sequence[_Zeros], mask: ZeroMask) -> None:
    for index, layer in enumerate(layers):
        for name, attribute in layer.sites:
            module = model.get_submodule(name)
            mark = module.__dict__.setdefault(MARK, None) or Mark(module)
            module.__dict__[MARK] = mark
            mark.layers[attribute] = (mask, index)


def release_layers(model: nn.Module, weights: Sequence[Tensor], layers: Iterable[Layer]) -> None:
    """Ends every hold on the weights of some layers."""
    zeros.release_zeros(weights)
    for name, attribute in (site for layer in layers for site in layer.sites):
        mark = model.get_submodule(name).__dict__.get(MARK)
        if mark is not None:
            mark.layers.pop(attribute, None)
            if not mark.layers:
                del model.get_submodule(name).__dict__[MARK]


def hold_plain_copy(weights: Sequence[Tensor], multiplier: BlockMultiplier, mask: Tensor) -> None:
    """Holds the weights of a plain copy of a pruned model. Repeated calls with one mask, as after every step, do nothing."""
    masks = [zeros.hold_of(weight) for weight in weights]
    if not all(held is not None and held.multiplier is multiplier and held.mask is mask for held in masks):
        zeros.hold_zeros(weights, ZeroMask(multiplier, mask))


@dataclass(frozen=True)
class _Zeros:
    """The zero blocks of one weight, and every module that has the weight."""

    name: str
    weight: nn.Parameter
    grid: Grid
    live: Tensor  # bool [n], on the CPU
    sites: tuple[tuple[str, str], ...]

    @property
    def blocks(self) -> int:
        return int((~self.live).sum())

    @property
    def elements(self) -> int:
        return int(self.grid.sizes()[~self.live].sum())


class Hold:
    """The zeros that :func:`hold` keeps. ``remove()`` lets them train again."""

    def __init__(self, model: nn.Module, block: Block | None, layers: Sequence[_Zeros]) -> None:
        self._model: ReferenceType[nn.Module] = ref(model)
        self.block = block
        self.blocks = {layer.name: layer.blocks for layer in layers}  # zero blocks by layer
        self.weights = {layer.name: layer.elements for layer in layers}  # zero weights by layer
        self.empty = tuple(layer.name for layer in layers if not layer.live.any())  # layers that are zero as a whole

    def remove(self) -> None:
        """Lets the blocks of the model train again. Copies of the model keep their zeros."""
        model = self._model()
        if model is not None:
            _release(model)

    def __repr__(self) -> str:
        number = sum(self.weights.values())
        layers = text.counted(len(self.blocks), "layer")
        if self.block is None:
            held = f"{number:,} zero weights in {layers}"
        else:
            held = f"{sum(self.blocks.values()):,} zero blocks of {self.block} in {layers}, {number:,} weights"
        return f"<Hold: {held}{_list('; all zero: ', self.empty)}>"


def hold(model: nn.Module, block: Block | str | Sequence[int | None] | Receipt | None = None) -> Hold:
    """Keeps the zeros of any model at zero while optimizers train it.

    The model can be a baked model, a plain copy, a model prepared for quantization-aware training, or one with weights from a
    file. After every step of a torch optimizer the zeros are written again, whatever weight decay and momentum do. The model
    gets no hooks and no new entries in its state dict. Zeros are also held in a deepcopy and in a pickled copy of the model.

    Args:
        model: The model.
        block: The zero blocks of this size are held, in all convolutions and linear layers. With a receipt, the blocks that it
            lists as removed are held. By default, every single zero in a parameter of two axes or more is held.

    Returns:
        A handle; its ``remove()`` lets the weights train again.

    Raises:
        SmartpruneError: The model has no zeros of this kind, does not match the receipt, or is still masked.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        >>> with torch.no_grad():
        ...     _ = model[0].weight[:4].zero_()
        >>> sp.hold(model, (4, 4))
        <Hold: 2 zero blocks of 4x4x1x1 in 1 layer, 32 weights>
    """
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"hold: model is a {type(model).__name__}; give a torch.nn.Module")
    if masked := next((name for name, module in model.named_modules() if is_masked(module)), None):
        raise SmartpruneError(
            f"hold: {masked or 'the model'} has a pruner, which holds zeros itself once it is frozen; call smartprune.bake first"
        )
    layers = _zeros_of_receipt(model, block) if isinstance(block, Receipt) else _zeros(model, block)
    size = block.block if isinstance(block, Receipt) else None if block is None else Block.of(block)
    if not layers:
        what = "zero weight" if size is None else f"zero block of {size}"
        raise SmartpruneError(f"hold: the model has no {what}; load the pruned weights first, and give the block of its receipt")
    _release(model)
    optimizers.install()
    mask = ZeroMask(
        BlockMultiplier([layer.grid for layer in layers]),
        torch.cat([layer.live for layer in layers]).to(layers[0].weight.device),
    )
    zeros.hold_zeros([layer.weight for layer in layers], mask)
    _mark(model, layers, mask)
    return Hold(model, size, layers)


def _release(model: nn.Module) -> None:
    """Ends every hold on the weights of a model, including the one of ``bake``."""
    for module in model.modules():
        mark = module.__dict__.pop(MARK, None)
        if mark is not None:
            zeros.remove_mark(mark)
    zeros.release_zeros(model.parameters())


def _zeros(model: nn.Module, block: Block | str | Sequence[int | None] | None) -> list[_Zeros]:
    """The weights that have zero blocks, or single zeros without a block."""
    size = None if block is None else Block.of(block)
    out = []
    for users in _by_weight(model):
        first = users[0]
        if size is None:
            grid = Grid(tuple(Axis(1, length, 1) for length in first.weight.shape))
        elif first.supported:
            try:
                grid = size.grid(tuple(first.weight.shape), first.parts, first.transposed)
            except SmartpruneError:  # the block has kernel sizes that this weight cannot take
                continue
        else:
            continue
        live = occupied(grid, full_tensor(first.weight.detach()))
        if not live.all():
            out.append(_Zeros(first.name, first.weight, grid, live, _sites(users)))
    return out


def _zeros_of_receipt(model: nn.Module, receipt: Receipt) -> list[_Zeros]:
    """The blocks that the receipt lists as removed, which must be zero."""
    by_name = {_weight_name(user): (user, users) for users in _by_weight(model) for user in users}
    out = []
    for row in receipt.layers:
        user, users = by_name.get(row.weight, (None, []))
        if user is None or tuple(user.weight.shape) != row.shape:
            problem = "not in the model" if user is None else f"{text.format_shape(user.weight.shape)} in the model"
            raise SmartpruneError(
                f"hold: {row.weight} is {text.format_shape(row.shape)} in the receipt and {problem}; give the receipt of "
                "this model, or a block"
            )
        grid, kept = receipt.block.grid(row.shape, row.parts, row.transposed), row.mask()
        if wrong := int((occupied(grid, full_tensor(user.weight.detach())) & ~kept).sum()):
            raise SmartpruneError(
                f"hold: {row.weight} has {wrong} blocks that are not zero and that the receipt lists as removed; load the pruned "
                "weights first"
            )
        if not kept.all():
            out.append(_Zeros(user.name, user.weight, grid, kept, _sites(users)))
    return out


def _by_weight(model: nn.Module) -> list[list[Candidate]]:
    """The floating-point weights with two axes or more, each with all modules that have it."""
    out: dict[int, list[Candidate]] = {}
    for candidate in candidates(model):
        if not candidate.lazy and candidate.weight.is_floating_point() and candidate.weight.layout is torch.strided:
            out.setdefault(id(candidate.weight), []).append(candidate)
    return list(out.values())


def _sites(users: Sequence[Candidate]) -> tuple[tuple[str, str], ...]:
    return tuple((user.module_name, user.attribute) for user in users)


def _weight_name(user: Candidate) -> str:
    return f"{user.module_name}.{user.attribute}" if user.module_name else user.attribute


def _list(label: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"{label}{', '.join(names[:NAMES])}{more}" if names else ""
