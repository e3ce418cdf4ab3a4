"""Backward passes through PyTorch's own operations that can be taken more than once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _ReusableBackward(torch.autograd.Function):
    """Computes a tensor with PyTorch's own operations and keeps their graph on ``ctx``."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], sources: list[Tensor], *inputs: Tensor) -> Tensor:
        # The hooks keep saved tensors away from activation checkpointing, which would look for them when it recomputes a part of
        # the model. They save values only: an operation that saves its own result would otherwise keep itself alive forever.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, _identity):
            ctx.result, ctx.sources = compute(), sources
        return ctx.result.detach()  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *torch.autograd.grad(ctx.result, ctx.sources, grad, retain_graph=True, allow_unused=True)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def reusable_backward(compute: Callable[[], Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Returns ``compute()``, a function of ``sources``, with a graph that allows several backward passes.

    One forward pass can have several: checkpointed parts of a model have one each, and so have accumulated batches that only call
    submodules. A CUDA graph has exactly one, so nothing is kept while one is captured.
    """
    sources = [source for source in sources if source.requires_grad]
    if not sources or not torch.is_grad_enabled() or (sources[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return compute()
    out: Tensor = _ReusableBackward.apply(compute, sources, *sources)  # type: ignore[no-untyped-call]
    return out
