"""Links: how a layer comes to compute with masked weights.

Its class is exchanged for a subclass whose ``weight`` is a property. The parameter itself stays where it was: same
object, same name, same place in ``parameters()``, ``state_dict()`` and every optimizer.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn

from ..core.kinds import LINK, USER_CLASS, user_class
from ..errors import SmartpruneError


class Source(Protocol):
    """Where a masked layer gets its weights from: the pruner."""

    def masked(self, index: int) -> Tensor: ...


STILL_MASKED = (
    "the model is still masked, and would be exported with its masks; call smartprune.bake(model) first, or bake and export a copy "
    "(copy.deepcopy)"
)
# while a module has one: a user's class, and all that its functions reach, goes with the last of its modules
_classes: WeakValueDictionary[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = WeakValueDictionary()


def put_on(module: nn.Module, source: Source, index: dict[str, int]) -> None:
    """From now on the module's attributes named in ``index`` read as masked weights of ``source``."""
    module.__dict__[LINK] = (source, dict(index))
    module.__class__ = masked_class(type(module), tuple(sorted(index)))


def take_off(module: nn.Module) -> None:
    """The module is as it was before :func:`put_on`; copies of it are not touched."""
    module.__class__ = user_class(module)  # put_on may have been interrupted before it had another one
    module.__dict__.pop(LINK, None)


def masked_class(cls: type[nn.Module], attributes: tuple[str, ...]) -> type[nn.Module]:
    """The stand-in for a module class in which ``attributes`` are masked. It is never changed once made, so copies that
    share it are safe, and it is pickled as the user's class plus the attribute names."""
    made = _classes.get((cls, attributes))
    if made is None:
        body: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
            USER_CLASS: cls,
            "_smartprune_attributes": attributes,
            "__prepare_scriptable__": _refuse,
        }
        for attribute in attributes:
            body[attribute] = property(_getter(attribute))
        made = _classes[cls, attributes] = type(cls.__name__, (cls,), body)
    return made


def _getter(attribute: str) -> Any:
    def get(self: nn.Module) -> Tensor:
        source, index = self.__dict__[LINK]
        masked: Tensor = source.masked(index[attribute])
        return masked

    return get


def _refuse(self: nn.Module) -> None:
    """What torch.jit.script asks every module for first."""
    raise SmartpruneError(STILL_MASKED)


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    state = object.__reduce_ex__(self, 2)[2]
    return _rebuild, (type(self)._smartprune_class, type(self)._smartprune_attributes), state


def _rebuild(cls: type[nn.Module], attributes: tuple[str, ...]) -> nn.Module:
    made = masked_class(cls, attributes)
    return made.__new__(made)
