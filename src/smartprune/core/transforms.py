"""Layers that transform their weight before they use it, for example by standardizing it, so that zeros do not survive."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .kinds import LAYER_FUNCTIONS, TRANSPOSED, user_class
from .sharding import is_sharded


def zeros_survive(module: nn.Module) -> bool:
    """Whether zeros of the stored weight are zeros of the weight that the layer computes with.

    They are not if its code subtracts a mean, for example. This runs a copy of the layer with a weight whose first
    input channel is zero. Returns True for layers of torch and for layers that cannot be tried.
    """
    cls = user_class(module)
    weight = module._parameters.get("weight")
    if cls.__module__.startswith("torch.") or module._modules or weight is None or weight.is_meta or is_sharded(weight):
        return True
    axis = 0 if isinstance(module, TRANSPOSED) else 1
    recorder = _WeightRecorder()
    try:
        probe = _probe(module, cls, weight, axis)
        kernel = zip(getattr(probe, "kernel_size", ()), getattr(probe, "dilation", ()), strict=True)
        shape = (1, getattr(probe, "in_channels", weight.shape[1]), *(1 + (size - 1) * step for size, step in kernel))
        x = weight.new_ones(shape)
        with torch.no_grad(), torch.random.fork_rng([weight.device] if weight.is_cuda else []), recorder:
            cls.forward(probe, x)
    except Exception:  # the layer's own code may raise anything for an input that it does not expect
        return True
    nonzero = [bool(used.select(axis, 0).any()) for used in recorder.weights if used.shape == weight.shape]
    return not nonzero or not all(nonzero)  # other weights of that shape may be parameters of the layer, too


def _probe(module: nn.Module, cls: type[nn.Module], weight: Tensor, axis: int) -> nn.Module:
    """A copy of a layer whose weight is zero in its first input channel only, and whose other parameters are ones."""
    probe = copy.copy(module)
    state = vars(module).items()  # a layer may cache its transformed weight in a container: the probe must not share it
    probe.__dict__.update({name: copy.copy(value) for name, value in state if isinstance(value, (dict, list, set))})
    probe.__class__, probe.training = cls, False
    probe._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    values = torch.linspace(1, 2, weight.numel()).reshape(weight.shape).to(weight)
    values.select(axis, 0).zero_()
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    ones = {name: nn.Parameter(torch.ones_like(value)) for name, value in parameters.items()}  # a gain may start at zero
    probe._parameters = {**module._parameters, **ones, "weight": nn.Parameter(values)}
    return probe


class _WeightRecorder(TorchFunctionMode):
    """Records the weights that linear layers and convolutions compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYER_FUNCTIONS:
            self.weights.append(args[1] if len(args) > 1 else kwargs["weight"])
        return func(*args, **kwargs)
