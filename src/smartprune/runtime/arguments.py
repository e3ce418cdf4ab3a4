"""The arguments of a call of an accelerated model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..core.memory import NoMemoryError, address_of
from ..errors import SmartpruneError
from .trace.inputs import UnsupportedInput

Call = tuple[Any, Any]  # positional and keyword arguments


def signature_of(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of the model's forward, or none if they are unknown."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def names_of(model: nn.Module) -> list[str]:
    """The names of the arguments that may be positional."""
    return [p.name for p in signature_of(model) if p.kind is p.POSITIONAL_OR_KEYWORD]


def in_order(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Keyword arguments as positional ones, as far as possible, so that equal calls have equal keys."""
    rest = dict(kwargs)
    for name in names[len(args) :]:
        if name not in rest:
            break
        args = (*args, rest.pop(name))
    return args, rest


def check_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if an input is missing, or if there are too many."""
    known = signature_of(model)
    try:
        inspect.Signature(known).bind(*args, **kwargs)
    except TypeError as error:
        for place, p in enumerate(known):
            is_single = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if is_single and p.default is p.empty and place >= len(args) and p.name not in kwargs:
                raise SmartpruneError(f"accelerated model: the input {p.name!r} is missing") from error
        count = len(args) + len(kwargs)
        raise SmartpruneError(f"accelerated model: takes {len(known)} inputs, and got {count} ({error})") from error


def check_memory(values: Sequence[Any]) -> None:
    """Raises :class:`UnsupportedInput` for tensors whose numbers are not in their memory, and an error for freed memory."""
    for value in values:
        if isinstance(value, Tensor):
            try:
                address_of(value, "accelerated model")
            except NoMemoryError:
                raise UnsupportedInput(f"a {type(value).__name__} without memory of its own") from None
