"""Masked modules: how a layer comes to compute with masked weights.

The class of a layer is replaced by a subclass whose ``weight`` is a property. The parameter itself stays in place: same object,
same name, same position in ``parameters()``, ``state_dict()`` and every optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..core.kinds import LINK, USER_CLASS, is_masked, user_class
from ..core.layers import Layer
from ..errors import SmartpruneError

Edge = tuple[nn.Module, str, nn.Module]  # parent, name, child


class Source(Protocol):
    """Where masked modules get their weights from."""

    def masked(self, index: int) -> Tensor: ...


STILL_MASKED = (
    "the model is still masked, and would be exported with its masks; call smartprune.bake(model) first, or bake and export a copy "
    "(copy.deepcopy)"
)
_REGISTER = parametrize.register_parametrization.__code__
# weak: a user's class, and everything that its functions refer to, can be freed with the last of its modules
_classes: WeakValueDictionary[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = WeakValueDictionary()


class MaskedModules:
    """The modules of a model that compute with masked weights, and the module that holds the scores."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.model = model
        self.indices: dict[str, dict[str, int]] = {}  # module name -> attribute -> index of the layer
        for i, layer in enumerate(layers):
            for module_name, attribute in layer.sites:
                self.indices.setdefault(module_name, {})[attribute] = i
        self.modules: dict[str, nn.Module] = {}
        self.edges: list[Edge] = []  # how the modules are reached from the model

    def mask(self, source: Source, host: tuple[str, nn.Module] | None) -> None:
        """Masks the modules. ``host``: name and module that hold the scores, if there are any."""
        self.modules = {name: self.model.get_submodule(name) for name in self.indices}
        if host is not None:
            self.modules[host[0]] = host[1]
        self.edges = self._find_edges("attach")
        for name, index in self.indices.items():
            mask_module(self.modules[name], source, index)

    def unmask(self) -> None:
        for name in self.indices:
            module = self.modules[name] if name in self.modules else self.model.get_submodule(name)
            if is_masked(module):  # if attach was interrupted, some are not
                unmask_module(module)

    def require_attached(self, call: str) -> None:
        """Raises if a masked module is no longer part of the model."""
        if not all(parent._modules.get(name) is child for parent, name, child in self.edges):
            self.edges = self._find_edges(call)  # a part may have been wrapped since, for example by torch.compile

    def _find_edges(self, call: str) -> list[Edge]:
        pairs = [(parent, *item) for parent in self.model.modules() for item in parent._modules.items()]
        edges = [(parent, name, child) for parent, name, child in pairs if child is not None]
        reachable = {id(self.model), *(id(child) for _, _, child in edges)}
        missing = [name for name, module in self.modules.items() if id(module) not in reachable]
        if missing:
            raise SmartpruneError(
                f"pruner.{call}(): {missing[0]} is no longer part of the model: it was removed or replaced after attach, so its "
                "replacement would not be pruned; change the model before you call attach"
            )
        wanted = {id(module) for module in self.modules.values()}
        out = []
        for parent, name, child in reversed(edges):  # from the leaves up: a parent is needed if a child is
            if id(child) in wanted:
                wanted.add(id(parent))
                out.append((parent, name, child))
        return out


def mask_module(module: nn.Module, source: Source, index: dict[str, int]) -> None:
    """From now on the module's attributes named in ``index`` return masked weights of ``source``."""
    module.__dict__[LINK] = (source, dict(index))
    module.__class__ = masked_class(type(module), tuple(sorted(index)))


def unmask_module(module: nn.Module) -> None:
    """Undoes :func:`mask_module`, even if it was interrupted. Copies of the module are not touched."""
    module.__class__ = user_class(module)
    module.__dict__.pop(LINK, None)


def masked_class(cls: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """The subclass of a module class in which ``attributes`` are masked. It is never changed, so copies can share it, and it is
    pickled as the user's class and the names of the attributes."""
    masked = _classes.get((cls, attributes))
    if masked is None:
        body: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
            USER_CLASS: cls,
            "_smartprune_attributes": attributes,
            "__prepare_scriptable__": _refuse_script,
        }
        for attribute in attributes:
            body[attribute] = property(_getter(attribute))
        masked = _classes[cls, attributes] = type(cls.__name__, (cls,), body)
    return masked


def _getter(attribute: str) -> Any:
    def get(self: nn.Module) -> Tensor:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code is _REGISTER:
            _refuse_parametrization(self, attribute)
        source, index = self.__dict__[LINK]
        masked: Tensor = source.masked(index[attribute])
        return masked

    return get


def _refuse_parametrization(self: nn.Module, attribute: str) -> None:
    """PyTorch would replace the stored parameter by the masked weight. Reading the weight is its first use of the layer."""
    raise SmartpruneError(
        f"register_parametrization: a pruner masks the {attribute} of this {type(self).__name__}, so it cannot be parametrized; "
        "parametrize it before you attach, or after smartprune.bake(model)"
    )


def _refuse_script(self: nn.Module) -> None:
    """torch.jit.script calls this for every module first."""
    raise SmartpruneError(STILL_MASKED)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    state = object.__reduce_ex__(self, 2)[2]
    return _rebuild, (type(self)._smartprune_class, type(self)._smartprune_attributes), state


def _rebuild(cls: type[nn.Module], attributes: tuple[str, ...]) -> nn.Module:
    masked = masked_class(cls, attributes)
    return masked.__new__(masked)
