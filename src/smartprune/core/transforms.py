"""Layers that compute with a transformed weight, such as a standardized one, so that zeros of the stored weight do not survive."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .kinds import LAYER_FUNCTIONS, TRANSPOSED, user_class
from .sharding import is_sharded


def zeros_survive(module: nn.Module) -> bool:
    """Whether a zero in a layer's weight is a zero in what the layer computes with. Code that first subtracts a mean, say,
    makes another number of it. Tried on a copy, with a weight whose first input channel is all zero."""
    cls = user_class(module)
    stored = module._parameters.get("weight")
    if cls.__module__.startswith("torch.") or module._modules or stored is None or stored.is_meta or is_sharded(stored):
        return True
    axis, used = 0 if isinstance(module, TRANSPOSED) else 1, _Used()
    try:
        probe = copy.copy(module)
        held = vars(module).items()  # a layer that keeps what it made in a dictionary, say, must not find what was made here
        probe.__dict__.update({name: copy.copy(value) for name, value in held if isinstance(value, (dict, list, set))})
        probe.__class__, probe.training = cls, False
        probe._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
        weight = torch.linspace(1, 2, stored.numel()).reshape(stored.shape).to(stored)
        weight.select(axis, 0).zero_()
        others = {name: value for name, value in module._parameters.items() if value is not None}
        ones = {name: nn.Parameter(torch.ones_like(value)) for name, value in others.items()}  # a gain may start at zero
        probe._parameters = {**module._parameters, **ones, "weight": nn.Parameter(weight)}
        sizes = zip(getattr(probe, "kernel_size", ()), getattr(probe, "dilation", ()), strict=True)
        x = weight.new_ones(1, getattr(probe, "in_channels", stored.shape[1]), *(1 + (size - 1) * step for size, step in sizes))
        with torch.no_grad(), torch.random.fork_rng([stored.device] if stored.is_cuda else []), used:
            cls.forward(probe, x)
    except Exception:  # whatever the layer's own code raises when it is not called as it is used to
        return True
    made = [bool(weight.select(axis, 0).any()) for weight in used.weights if weight.shape == stored.shape]
    return not made or not all(made)  # others of that shape may be parameters of the layer's own


class _Used(TorchFunctionMode):
    """Notes the weights that linear layers and convolutions are computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LAYER_FUNCTIONS:
            self.weights.append(args[1] if len(args) > 1 else kwargs["weight"])
        return func(*args, **kwargs)
