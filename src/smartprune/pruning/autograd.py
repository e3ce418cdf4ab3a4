"""Backward passes: through PyTorch's own operations more than once, and errors for second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import SmartpruneError


class _SecondDerivative(torch.autograd.Function):
    """Returns gradients as they are, and raises if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise SmartpruneError(
            "backward: got a second derivative with respect to masked weights, and a model with a pruner supports only the first "
            "one; take gradients with respect to inputs, or bake a copy of the model and differentiate that twice"
        )


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The decorator of torch for backward passes that cannot be differentiated, with an error that says what to do."""

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            out = backward(ctx, *grads)
        sources = [grad for grad in grads if grad is not None and grad.requires_grad]
        if not sources or not torch.is_grad_enabled():
            return out
        known = [i for i, grad in enumerate(out) if isinstance(grad, Tensor)]
        # the sources connect the results with the graph, and add nothing to them
        marked = _SecondDerivative.apply(*(out[i] for i in known), *sources)  # type: ignore[no-untyped-call]
        return tuple(marked[known.index(i)] if i in known else grad for i, grad in enumerate(out))

    return checked


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
    @once_differentiable
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
