"""The command that starts a run with the settings of another one."""

from __future__ import annotations

import shlex
from typing import Any

from .config import Config, configure, flags

AUTOMATIC = ("device", "threads", "amp", "graph", "onnx")  # a run stores what its machine chose


def train_command(config: Config) -> str:
    """``smartprune train`` with the settings that differ from the defaults of the task, except those the machine chooses."""
    defaults = configure({"task": config.task})
    method_defaults = configure({"task": config.task, "method": config.method}).settings
    words = ["smartprune", "train", config.task]
    for field in flags():
        value = getattr(config, field.name)
        if field.name in AUTOMATIC or value is None or value == getattr(defaults, field.name):
            continue
        for part in value if isinstance(value, tuple) else (value,):
            words += ["--" + field.name.replace("_", "-"), _word(part)]
    for flag, settings, usual in (
        ("--set", config.settings, method_defaults),
        ("--task-set", config.task_settings, defaults.task_settings),
    ):
        words += [word for name, value in settings.items() if value != usual[name] for word in (flag, f"{name}={_word(value)}")]
    return shlex.join(words)


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
