"""Calibration: a method observes the gradients of blocks while no parameter of the model moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import optimizers
from .autograd import once_differentiable
from .multiply import BlockMultiplier


class Calibration:
    """From the first step of a calibration to its last: sums of gradients, paused parameters, frozen running statistics."""

    def __init__(self, model: nn.Module, multiplier: BlockMultiplier, device: torch.device) -> None:
        self.model = model
        self.gradients = BlockGradients(multiplier, device)
        self.pause_parameters()
        norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        self.norms = [freeze_running_statistics(module) for module in norms]

    def pause_parameters(self) -> None:
        """Also called in a copy of the model and after parameters were replaced, because the registry holds parameters, not
        models."""
        optimizers.pause(self.model.parameters())

    def to(self, device: torch.device) -> None:
        self.gradients = BlockGradients(self.gradients.multiplier, device)

    def stop(self) -> None:
        optimizers.resume(self.model.parameters())
        for module, attribute, value in self.norms:
            setattr(module, attribute, value)


def freeze_running_statistics(module: nn.Module) -> tuple[nn.Module, str, Any]:
    """Stops a norm from updating its running statistics. Returns the module, the attribute that was changed and its old value.

    Batch norms then use the statistics of each batch. Instance norms would also do so in evaluation, so their momentum is set to
    zero instead.
    """
    is_instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm)
    attribute, value = ("momentum", 0.0) if is_instance_norm else ("track_running_stats", False)
    before = getattr(module, attribute)
    setattr(module, attribute, value)
    return module, attribute, before


class BlockGradients:
    """The sum of ``|gradient * weight|`` over every block, [n], since :meth:`clear`, and whether a backward pass was seen."""

    def __init__(self, multiplier: BlockMultiplier, device: torch.device) -> None:
        self.multiplier = multiplier
        with torch.inference_mode(False):  # a search may be resumed there, and later backward passes add to this tensor
            self.total = torch.zeros(multiplier.starts[-1], device=device)
        self.seen = False

    def clear(self) -> None:
        self.total.zero_()
        self.seen = False

    def multiply(self, mask: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """``weight * mask`` for every weight. The backward pass adds to ``total`` and gives the weights gradients of zero."""
        return list(_ObservedMultiply.apply(mask, self, *weights))  # type: ignore[no-untyped-call]


class _ObservedMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, gradients: BlockGradients, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        ctx.products = [product.detach() for product in gradients.multiplier.multiply(mask, [w.detach() for w in weights])]
        return tuple(product.view_as(product) for product in ctx.products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        gradients: BlockGradients = ctx.gradients
        sizes = [None if grad is None else grad.abs() for grad in grads]
        sums = gradients.multiplier.block_sums(sizes, [product.abs() for product in ctx.products])
        gradients.total += sums
        gradients.seen = True
        zero = 0 * sums.sum()  # or NaN, which a gradient scaler must see
        zeros = [
            torch.empty_like(product).fill_(zero) if needed else None
            for product, needed in zip(ctx.products, ctx.needs_input_grad[2:], strict=True)
        ]
        return (None, None, *zeros)
