"""The fallback for models without a plan: they run their own code, with replaced convolutions and linear layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .module import Accelerated, Options
from .trace.inputs import as_float32
from .trace.tracer import Opaque

REPLACED = (nn.Conv2d, nn.Linear)  # the types of layers that are accelerated one by one
CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Proxy(nn.Module):
    """Has the attributes of the module in the list ``_model`` in addition to its own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None:
                raise
            return getattr(model[0], name)


class ReplacedLayer(Accelerated):
    """Replaces one layer and has its attributes, because model code may read its weight or its number of outputs."""


class ReplacedModel(Proxy, Opaque):
    """A model that runs its own code with replaced layers. For inference only and in float32, like one with a plan."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that functions applied to all submodules do not change it
        super().train(False)

    def train(self, mode: bool = True) -> ReplacedModel:
        """Has no effect: the module stays in eval mode."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the model are set on the model, because its code reads them there."""
        model = self.__dict__.get("_model")
        is_own = name in self.__dict__ or hasattr(type(self), name)
        if model is not None and not is_own and hasattr(model[0], name):
            setattr(model[0], name, value)
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"runs the model's own code with replaced layers: {self._model[0]!r}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if any(isinstance(x, Tensor) and as_float32(x) is not x for x in tree_leaves((args, kwargs))):
                args, kwargs = tree_map_only(Tensor, as_float32, (args, kwargs))
            return self._model[0](*args, **kwargs)  # not copies: a model may append to a list among its inputs


def replace_layers(model: nn.Module, options: Options) -> ReplacedModel:
    """The model with an accelerated layer in place of every convolution and linear layer.

    Layers inside modules of torch (attention, transformer layers) stay, because these pass the weights to other functions.
    """
    replaced: dict[int, ReplacedLayer] = {}
    if not is_torch_module(model):
        _replace_children(model, options, replaced, set())
    return ReplacedModel(model)


def _replace_children(owner: nn.Module, options: Options, replaced: dict[int, ReplacedLayer], seen: set[int]) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, module in list(owner._modules.items()):
        if module is None or isinstance(module, Accelerated):
            continue
        if type(module) in REPLACED:
            if id(module) not in replaced:
                replaced[id(module)] = ReplacedLayer(module, options, None)
            owner._modules[name] = replaced[id(module)]
        elif not is_torch_module(module):
            _replace_children(module, options, replaced, seen)


def original_of(model: nn.Module) -> nn.Module:
    """A model without accelerated parts: that inside an accelerated one, or a copy with the layers that were replaced."""
    while isinstance(model, (Accelerated, ReplacedModel)):
        model = model._model[0]
    if not any(isinstance(module, Accelerated) for module in model.modules()):
        return model
    out = copy.deepcopy(model)
    for owner in list(out.modules()):
        for name, module in owner._modules.items():
            if isinstance(module, Accelerated):
                owner._modules[name] = original_of(module)
    return out


def is_torch_module(module: nn.Module) -> bool:
    """Whether a module's class is one of torch's, other than containers."""
    return any(base.__module__.startswith(("torch.nn.", "torch.ao.")) and base not in CONTAINERS for base in type(module).__mro__)
