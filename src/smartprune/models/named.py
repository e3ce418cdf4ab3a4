"""A network by its name: ours, one of timm's or torchvision's where those are installed, or a function of the user's."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import SmartpruneError

HOW = "timm/NAME, torchvision/NAME or MODULE:FUNCTION for others"


def foreign(name: str) -> bool:
    """Whether a name asks for a network that is not of this package."""
    return ":" in name or name.startswith(("timm/", "torchvision/"))


def build(name: str, **settings: int) -> nn.Module:
    """A fresh network. ``settings`` are what the data asks for: ``num_classes`` and ``in_channels``.

    A function of the user's gets those that it has parameters for. It may return any module whose output fits the task.
    """
    from . import MODELS

    if name in MODELS:
        return MODELS[name](**settings)
    library, slash, rest = name.partition("/")
    if slash and library == "timm":
        return _timm(name, rest, settings)
    if slash and library == "torchvision":
        return _torchvision(name, rest, settings)
    if ":" not in name:
        raise SmartpruneError(f"unknown model {name!r}; there are: {', '.join(MODELS)}; or write {HOW}")
    with _current_folder():
        return _made(name, _imported(name), settings)


def _timm(name: str, rest: str, settings: dict[str, int]) -> nn.Module:
    timm = _library(name, "timm")
    if not timm.is_model(rest):
        close = timm.list_models(f"*{rest[:8]}*")[:8] if rest else []
        raise SmartpruneError(f"model={name!r}: timm has no such model" + (f"; near it: {', '.join(close)}" if close else ""))
    names = {"num_classes": "num_classes", "in_channels": "in_chans"}
    return _called(name, timm.create_model, {"model_name": rest, **{names[key]: value for key, value in settings.items()}})


def _torchvision(name: str, rest: str, settings: dict[str, int]) -> nn.Module:
    models = _library(name, "torchvision.models")
    if rest not in models.list_models():
        close = models.list_models(include=f"*{rest[:6]}*")[:8] if rest else []
        near = f"; near it: {', '.join(close)}" if close else ""
        raise SmartpruneError(f"model={name!r}: torchvision has no such model{near}")
    if settings.pop("in_channels", 3) != 3:
        raise SmartpruneError(f"model={name!r}: torchvision's networks take 3 channels; this task has pictures of another kind")
    return _called(name, models.get_model, {"name": rest, "weights": None, **settings})


def _library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that was built for another torch
        package = module.partition(".")[0]
        raise SmartpruneError(
            f"model={name!r} needs {package}, which cannot be imported ({error}); install one that fits your torch"
        ) from None


def _imported(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SmartpruneError(f"{name}: cannot be imported ({error})") from None


def _made(name: str, found: Any, settings: dict[str, int]) -> nn.Module:
    if isinstance(found, nn.Module):
        return copy.deepcopy(found)  # the object stays as the module made it: a run needs more than one
    if not callable(found):
        raise SmartpruneError(f"{name} is a {type(found).__name__}; it should be a function that returns a torch.nn.Module")
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin
        parameters = {}  # type: ignore[assignment]
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return _called(name, found, {key: value for key, value in settings.items() if every or key in parameters})


def _called(name: str, function: Callable[..., Any], settings: dict[str, Any]) -> nn.Module:
    try:
        model = function(**settings)
    except Exception as error:  # whatever happens in code that is not ours
        raise SmartpruneError(f"{name}() failed with {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{name} gives a {type(model).__name__}; it should return a torch.nn.Module")
    return model


@contextmanager
def _current_folder() -> Iterator[None]:
    """Modules in the current folder can be imported, as with ``python -m``."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
