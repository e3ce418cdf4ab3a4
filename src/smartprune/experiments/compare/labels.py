"""Labels of methods, tasks and budgets in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from ...methods import METHODS
from ...tasks import TASKS


def method_label(name: str, settings: Mapping[str, Any]) -> str:
    return label(name, METHODS, settings)


def task_label(config: Mapping[str, Any]) -> str:
    """The task with the settings that are not its defaults. The folder of its data does not count."""
    settings = {name: value for name, value in config["task_settings"].items() if name != "folder"}
    return label(config["task"], TASKS, settings)


def label(name: str, choices: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any]) -> str:
    """``smart``, or ``smart(ramp=cubic)`` where a setting is not the default."""
    defaults: dict[str, Any] = {}
    if name in choices:
        defaults = {f.name: f.default for f in fields(choices[name]) if f.default is not MISSING}  # type: ignore[arg-type]
    changed = [f"{key}={format_setting(value)}" for key, value in settings.items() if key not in defaults or defaults[key] != value]
    return f"{name}({', '.join(changed)})" if changed else name


def format_setting(value: Any) -> str:
    """A setting as text. Different values have different texts.

    >>> format_setting(0.1), format_setting(1.0), format_setting(0.12345678)
    ('0.1', '1', '0.12345678')
    """
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
