"""A model that keeps its own code: its convolutions and linear layers are replaced, one by one."""

from __future__ import annotations

from typing import Any

from torch import nn

from .module import Accelerated, Options

CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Replaced(Accelerated):
    """In place of one layer. What else the model reads of that layer (its weight, its number of outputs) is still there."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_model")
            if held is None:
                raise
            return getattr(held[0], name)


def layered(model: nn.Module, options: Options) -> nn.Module:
    """The model with an accelerated layer for each of its convolutions and linear layers. The inside of torch's own modules
    (attention, transformer layers) stays as it is: they hand their layers' weights to other functions."""
    made: dict[int, Replaced] = {}
    if not torch_own(model):
        _replace(model, options, made, set())
    return model


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
