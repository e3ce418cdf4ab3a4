"""A model that keeps its own code: its convolutions and linear layers are replaced, one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .module import Accelerated, Options
from .trace.inputs import as_float32
from .trace.tracer import Opaque

CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Holder(nn.Module):
    """Stands for the module in the list ``_model``: what it does not have itself is that one's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_model")
            if held is None:
                raise
            return getattr(held[0], name)


class Replaced(Holder, Accelerated):
    """In place of one layer. What else the model reads of that layer (its weight, its number of outputs) is still there."""


class Layered(Holder, Opaque):
    """In place of a model that keeps its own code: for inference only and in float32, like one that has a plan."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that nothing that is done to all submodules reaches it
        super().train(False)

    def train(self, mode: bool = True) -> Layered:
        """Stays in eval mode, whatever a surrounding model does."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model's code reads of itself is set there."""
        held = self.__dict__.get("_model")
        own = name in self.__dict__ or hasattr(type(self), name)
        if held is not None and not own and hasattr(held[0], name):
            setattr(held[0], name, value)
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"own code with its layers replaced: {self._model[0]!r}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            if any(isinstance(x, Tensor) and as_float32(x) is not x for x in tree_leaves((args, kwargs))):
                args, kwargs = tree_map_only(Tensor, as_float32, (args, kwargs))
            return self._model[0](*args, **kwargs)  # as they are, for a model may add to a list that it is given


def layered(model: nn.Module, options: Options) -> Layered:
    """The model with an accelerated layer for each of its convolutions and linear layers. The inside of torch's own modules
    (attention, transformer layers) stays as it is: they hand their layers' weights to other functions."""
    made: dict[int, Replaced] = {}
    if not torch_own(model):
        _replace(model, options, made, set())
    return Layered(model)


def _replace(owner: nn.Module, options: Options, made: dict[int, Replaced], seen: set[int]) -> None:
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, module in list(owner._modules.items()):
        if module is None or isinstance(module, Accelerated):
            continue
        if type(module) in (nn.Conv2d, nn.Linear):
            if id(module) not in made:
                made[id(module)] = Replaced(module, options, None)
            owner._modules[name] = made[id(module)]
        elif not torch_own(module):
            _replace(module, options, made, seen)


def torch_own(module: nn.Module) -> bool:
    """Whether a module's code is torch's and does more than hold others."""
    return any(base.__module__.startswith(("torch.nn.", "torch.ao.")) and base not in CONTAINERS for base in type(module).__mro__)
