"""Gradients of torch's own operations that can be taken more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Again(torch.autograd.Function):
    """A tensor made by torch's own operations, whose gradient can be taken more than once."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], sources: list[Tensor], *inputs: Tensor) -> Tensor:
        # what is kept is ours: a checkpointed part of the model, in which this may run, would look for it when it runs again.
        # Values alone: an operation that keeps its own result would keep itself, and all before it, for ever
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _itself):
            ctx.made, ctx.sources = make(), sources
        return ctx.made.detach()  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *torch.autograd.grad(ctx.made, ctx.sources, grad, retain_graph=True, allow_unused=True)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def again(make: Callable[[], Tensor], sources: Sequence[Tensor]) -> Tensor:
    """What ``make`` gives of ``sources``. Parts of a model that are checkpointed, and batches whose gradients add up without a
    forward pass of the whole model, each bring a backward pass, and torch's operations stand one. (A captured graph has one.)"""
    sources = [source for source in sources if source.requires_grad]
    if not sources or not torch.is_grad_enabled() or (sources[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    out: Tensor = _Again.apply(make, sources, *sources)  # type: ignore[no-untyped-call]
    return out
