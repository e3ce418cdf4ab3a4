"""Names in a table: a method or a task, with the settings that are not its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ...methods import METHODS


def method_name(name: str, settings: Mapping[str, Any]) -> str:
    return named(name, METHODS, settings)


def named(name: str, choices: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any]) -> str:
    """``smart``, or ``smart(ramp=cubic)`` where a setting is not the default."""
    usual: dict[str, Any] = {}
    if name in choices:
        usual = {f.name: f.default for f in fields(choices[name]) if f.default is not MISSING}  # type: ignore[arg-type]
    own = [f"{key}={plain(value)}" for key, value in settings.items() if key not in usual or usual[key] != value]
    return f"{name}({', '.join(own)})" if own else name


def plain(value: Any) -> str:
    """A setting as text; two that differ have two texts.

    >>> plain(0.1), plain(1.0), plain(0.12345678)
    ('0.1', '1', '0.12345678')
    """
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
