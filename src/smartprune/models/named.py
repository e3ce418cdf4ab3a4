"""Builds a network by name: one of this package, of timm or torchvision, or a function of the user."""

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

OTHER_NAMES = "timm/NAME, torchvision/NAME or MODULE:FUNCTION"


def is_external(name: str) -> bool:
    """Whether a name refers to a network outside of this package."""
    return ":" in name or name.startswith(("timm/", "torchvision/"))


def is_function(name: str) -> bool:
    """Whether a name refers to a function of the user, whose module would be imported.

    >>> is_function("mypackage.net:build"), is_function("resnet18"), is_function("timm/resnet18")
    (True, False, False)
    """
    return ":" in name and name.partition("/")[0] not in ("timm", "torchvision")


def build(name: str, **settings: int) -> nn.Module:
    """A new network. ``settings`` are ``num_classes`` and ``in_channels``, as the data requires.

    A function of the user gets the settings that it has parameters for. It may return any module whose output fits the
    task.
    """
    from . import MODELS

    if name in MODELS:
        return MODELS[name](**settings)
    library, slash, model = name.partition("/")
    if slash and library == "timm":
        return _build_timm(name, model, settings)
    if slash and library == "torchvision":
        return _build_torchvision(name, model, settings)
    if ":" not in name:
        raise SmartpruneError(f"unknown model {name!r}; choose from {', '.join(MODELS)}, or use {OTHER_NAMES}")
    with _current_folder_importable():
        return _build_from_object(name, _import_object(name), settings)


def _build_timm(name: str, model: str, settings: dict[str, int]) -> nn.Module:
    timm = _import_library(name, "timm")
    if not timm.is_model(model):
        similar = timm.list_models(f"*{model[:8]}*")[:8] if model else []
        raise SmartpruneError(f"model={name!r} is not a model of timm" + _suggest(similar))
    parameters = {"num_classes": "num_classes", "in_channels": "in_chans"}
    return _call(name, timm.create_model, {"model_name": model, **{parameters[key]: value for key, value in settings.items()}})


def _build_torchvision(name: str, model: str, settings: dict[str, int]) -> nn.Module:
    models = _import_library(name, "torchvision.models")
    if model not in models.list_models():
        similar = models.list_models(include=f"*{model[:6]}*")[:8] if model else []
        raise SmartpruneError(f"model={name!r} is not a model of torchvision" + _suggest(similar))
    channels = settings.pop("in_channels", 3)
    if channels != 3:
        raise SmartpruneError(
            f"model={name!r} takes 3 input channels, but the images of this task have {channels}; use a model of smartprune or timm"
        )
    return _call(name, models.get_model, {"name": model, "weights": None, **settings})


def _suggest(names: list[str]) -> str:
    return f"; similar names: {', '.join(names)}" if names else ""


def _import_library(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        package = module.partition(".")[0]
        raise SmartpruneError(
            f"model={name!r} needs {package}, which cannot be imported ({error}); install a version that fits your torch"
        ) from None


def _import_object(name: str) -> Any:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SmartpruneError(f"{name}: cannot be imported ({error})") from None


def _build_from_object(name: str, value: Any, settings: dict[str, int]) -> nn.Module:
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)  # a run builds more than one model
    if not callable(value):
        raise SmartpruneError(f"{name} is a {type(value).__name__}; it must be a function that returns a torch.nn.Module")
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):  # built-in functions have no signature
        parameters = {}  # type: ignore[assignment]
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return _call(name, value, {key: setting for key, setting in settings.items() if accepts_all or key in parameters})


def _call(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> nn.Module:
    try:
        model = function(**arguments)
    except Exception as error:  # external code may raise anything
        raise SmartpruneError(f"{name}() failed with {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{name}() returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Allows imports from the current folder, like ``python -m``."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
