"""The weights that layers compute with while a pruner is attached, made once per forward pass for all layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.kinds import LAYER_TYPES, user_class
from ..core.sharding import is_sharded
from ..errors import SmartpruneError
from . import checks, optimizers
from .autograd import reusable_backward
from .consensus import has_process_group
from .masked import STILL_MASKED
from .state import SearchState


@dataclass
class MaskedWeights:
    """The masked weights of a forward pass, and what they were made from."""

    weights: list[Tensor]  # empty once they are not needed any more
    mask: Tensor
    factors: Tensor  # [n], what weights were multiplied by: the mask, or an amplified one
    key: tuple[int, ...]
    versions: list[int]  # of the stored weights
    with_grad: bool
    in_inference_mode: bool
    autocast: torch.dtype | None  # the dtype that autocast wants layers to compute in


class LiveWeights:
    """Makes masked weights when a layer or the model asks, and keeps them while they are valid."""

    def __init__(self, search: SearchState) -> None:
        self.search = search
        self.last: MaskedWeights | None = None
        self.inside_forward = False
        self._castable: list[bool] | None = None  # by layer: whether autocast would cast the weight

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None, "inside_forward": False}

    def masked(self, index: int) -> Tensor:
        """The weight that layer ``index`` computes with. The layer calls this."""
        if self.search.is_sharded:
            return self._masked_shard(index)
        if not torch.compiler.is_compiling():
            return self.ensure(index)[index]
        if not self.inside_forward:
            _ensure_uncompiled(self, index)
        assert self.last is not None
        return self.last.weights[index]

    def before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            raise SmartpruneError(STILL_MASKED)
        _refresh(self)
        self.inside_forward = True

    def after_forward(self, module: nn.Module, args: Any, out: Any) -> None:
        self.inside_forward = False
        if self.last is not None and not self.last.with_grad:
            self.last.weights = []  # an evaluation is over; a backward pass that recomputes would still need them
            self.last = None

    def is_valid(self, masked: MaskedWeights, index: int) -> bool:
        """Whether the masked weights still belong to the current weights and scores."""
        same_weight = masked.versions[index] == self.search.blocks.layer_weight(index)._version
        return bool(masked.weights) and same_weight and masked.autocast == _autocast_dtype() and self._is_mask_valid(masked)

    def _is_mask_valid(self, masked: MaskedWeights) -> bool:
        if masked.in_inference_mode and not torch.is_inference_mode_enabled():
            return False
        return (masked.with_grad or not torch.is_grad_enabled()) and masked.key == self._key()

    def _key(self) -> tuple[int, ...]:
        return (self.search.count, optimizers.step_count(), *(p._version for p in self.search.parameters()))

    def ensure(self, index: int) -> list[Tensor]:
        """Valid masked weights, held in a local variable: an evaluation that ends in another thread drops ``last``."""
        masked = self.last
        weights = [] if masked is None else masked.weights
        if masked is not None and weights and self.is_valid(masked, index):
            return weights
        return _refresh(self, masked.mask if masked is not None and self._is_mask_valid(masked) else None)

    def _masked_shard(self, index: int) -> Tensor:
        """The masked weight of one layer. FSDP gathers each weight just before its layer needs it, so they are masked one by one.
        At other times the layer returns the part of its weight that this rank stores."""
        search = self.search
        weight: Tensor = search.blocks.layer_weight(index)
        if is_sharded(weight):
            return weight
        if self.last is None or not self._is_mask_valid(self.last):
            self.refresh()
        assert self.last is not None
        with torch.autocast(weight.device.type, enabled=False):
            if not search.capabilities.trains_weights and search.hard is None:
                weight = weight.detach()
            straight_through, is_zeroed = search.capabilities.straight_through, search.hard is not None
            return search.multiplier.multiply_layer(self.last.factors, index, weight, straight_through, is_zeroed)

    def refresh(self, mask: Tensor | None = None) -> list[Tensor]:
        """Makes all masked weights with one solve, unless the mask is given, and one multiplication."""
        search = self.search
        checks.require_no_transform()
        checks.require_sharded_before_attach(search)
        self.last = None  # first, so that old and new weights are not in memory at the same time
        if torch.is_grad_enabled():
            checks.require_steps(search)
            search.seen.forward = optimizers.step_count()
            search.seen.replays |= torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        search.to_device()
        search.activate()
        if search.hard is not None:
            search.zero_removed_blocks()
        weights: Sequence[Tensor] = search.blocks.weights
        checks.require_shapes(search, weights)
        autocast = _autocast_dtype()
        dtypes = None if autocast is None else self._product_dtypes(weights, autocast)
        with torch.autocast(weights[0].device.type, enabled=False):
            if search.hard is not None:
                mask = factors = search.hard
            else:
                mask = self._soft_mask() if mask is None else mask
                factors = self._factors(mask)
            masked = self._multiply(factors, weights, dtypes)
        self.last = MaskedWeights(
            masked,
            mask,
            factors,
            self._key(),
            [weight._version for weight in weights],
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
        )
        return masked

    def _soft_mask(self) -> Tensor:
        search = self.search
        seed = search.seed * 1_000_003 + search.count if search.model.training else None
        if not search.capabilities.plain_autograd:
            return search.soft_mask(seed)
        return reusable_backward(lambda: search.soft_mask(seed), [*search.parameters(), *search.blocks.weights])

    def _factors(self, mask: Tensor) -> Tensor:
        """What weights are multiplied by: the mask, or a larger number if the method compensates for a soft mask."""
        amplify = getattr(self.search.method, "amplify", None)
        if amplify is None:
            return mask
        if not self.search.capabilities.plain_autograd:
            return amplify(self.search.blocks, mask)  # type: ignore[no-any-return]
        return reusable_backward(lambda: amplify(self.search.blocks, mask), [mask])

    def _multiply(self, factors: Tensor, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype | None] | None) -> list[Tensor]:
        search = self.search
        if search.is_sharded:
            return []  # made one by one, when the layers ask
        if search.hard is not None:
            idle = search.parameters() if has_process_group() else []  # DDP, even of one rank, waits for a gradient of each
            return search.multiplier.mask_gradients(factors, weights, idle, dtypes)
        if search.calibration is not None:
            return search.calibration.gradients.multiply(factors, weights)
        trained = weights if search.capabilities.trains_weights else [weight.detach() for weight in weights]
        return search.multiplier.multiply(factors, trained, search.capabilities.straight_through, dtypes)

    def _product_dtypes(self, weights: Sequence[Tensor], autocast: torch.dtype) -> list[torch.dtype | None]:
        """The dtype that autocast would cast each weight to in PyTorch's own layers. The multiplication casts at no extra cost."""
        if self._castable is None:
            model, layers = self.search.model, self.search.plan.layers
            classes = [[user_class(model.get_submodule(name)) for name, _ in layer.sites] for layer in layers]
            self._castable = [all(cls in LAYER_TYPES for cls in of_layer) for of_layer in classes]
        is_float = [weight.is_cuda and weight.dtype == torch.float32 for weight in weights]
        return [autocast if cast and known else None for cast, known in zip(is_float, self._castable, strict=True)]


def _autocast_dtype() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


# Within torch.compile these run uncompiled. (torch.compiler.disable would load the compiler in every process.)
_refresh_uncompiled = torch._disable_dynamo(LiveWeights.refresh)  # type: ignore[attr-defined]
_ensure_uncompiled = torch._disable_dynamo(LiveWeights.ensure)  # type: ignore[attr-defined]


def _refresh(live: LiveWeights, mask: Tensor | None = None) -> list[Tensor]:
    """A hook on which the compiler gave up runs uncompiled, but the functions that it calls would be compiled. So this bypasses
    the compiler whenever it is loaded."""
    if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
        masked: list[Tensor] = _refresh_uncompiled(live, mask)
        return masked
    return live.refresh(mask)
