"""The settings of a run from flags and configuration files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ..errors import SmartpruneError
from ..training.config import BUDGET_SETTINGS, DEFAULTS, Config, flags
from .common import BUDGET, COMMON, DEVICES, LAYERS, OUTPUT, SCHEDULE, Parser

FIRST_OF_GROUP = {  # the first setting of every group of flags; settings are in the order of Config
    "model": COMMON,
    "sparsity": BUDGET,
    "include": LAYERS,
    "dense": SCHEDULE,
    "ema": "averaging, distillation and augmentation",
    "seed": DEVICES,
    "tensorboard": OUTPUT,
}


def add_flags(parser: Parser, without: tuple[str, ...] = ()) -> None:
    """Adds a flag for every setting of a run, with the name and type of the setting."""
    hints = get_type_hints(Config)
    title = COMMON
    for field in flags():
        title = FIRST_OF_GROUP.get(field.name, title)
        if field.name in without:
            continue
        group = parser.group(title)
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        if get_origin(hint) is tuple:
            group.add_argument(flag, action="append", metavar="GLOB", help=field.metadata["help"])
        else:
            kind = next(arg for arg in (get_args(hint) or (hint,)) if arg is not type(None))
            metavar = field.metadata.get("metavar", {int: "N", float: "X", str: "NAME"}[kind])
            group.add_argument(flag, type=kind, metavar=metavar, help=field.metadata["help"] + _default(field))


def _default(field: Field[Any]) -> str:
    """What the help says about the default of a setting."""
    if field.default is MISSING or field.name == "sparsity":
        return " (default: by task)"
    return "" if field.default in (None, "") else f" (default: {field.default})"


def requested_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings from the configuration file and the flags. Flags take precedence."""
    from ..training.config import load_config, read_config

    settings: dict[str, Any] = {}
    if args.config:
        settings = read_config(args.config)
        if "task" in settings:
            load_config(args.config)  # raises if the file is wrong by itself; the error names the file
        settings = {**DEFAULTS, **({} if args.task is None else {"task": args.task}), **settings}
        settings.pop("out", None)
    from_flags = {field.name: getattr(args, field.name) for field in flags() if getattr(args, field.name) is not None}
    if args.task is not None:
        from_flags["task"] = args.task
    for kind, key, texts in (("task", "task_settings", args.task_set), ("method", "settings", args.set)):
        if from_flags.get(kind, settings.get(kind)) != settings.get(kind):
            settings.pop(key, None)  # they belong to another task or method
        if texts and isinstance(settings.get(key, {}), dict):  # any other type is an error, which configure() raises
            settings[key] = {**settings.get(key, {}), **parse_settings(kind, from_flags.get(kind, settings.get(kind)), texts)}
    if any(name in from_flags for name in BUDGET_SETTINGS):  # replaces the budget of the configuration file
        settings |= dict.fromkeys(BUDGET_SETTINGS)
    if args.data and isinstance(settings.get("task_settings", {}), dict):
        settings["task_settings"] = {**settings.get("task_settings", {}), "folder": str(Path(args.data).absolute())}
    if args.out:
        from_flags["out"] = args.out
    for name in ("dense", "npu", "cost_table"):  # absolute, because a run may be resumed from another working directory
        if from_flags.get(name) and (name != "npu" or from_flags[name].endswith(".json")):
            from_flags[name] = str(Path(from_flags[name]).absolute())
    return {**settings, **from_flags}


def parse_settings(kind: str, name: object, texts: Iterable[str]) -> dict[str, Any]:
    """Settings of a ``"task"`` or ``"method"`` from texts such as ``end=1e-4``.

    Values become numbers, booleans and None where possible. A value such as ``none`` stays a text if only that fits the
    type of the setting.
    """
    from ..methods import METHODS
    from ..tasks import TASKS
    from ..training.config import accepts

    records: dict[Any, Any] = {"task": dict(TASKS), "method": dict(METHODS)}[kind]
    record = records.get(name if isinstance(name, str) else DEFAULTS[kind])
    settings: dict[str, Any] = {}
    for text in texts:
        setting, equals, value = text.partition("=")
        if not equals or not setting:
            raise SmartpruneError(f"{text!r} is not a setting; write NAME=VALUE, such as end=1e-4")
        parsed = _parse(value)
        keep_text = record is not None and accepts(record, setting, value) and not accepts(record, setting, parsed)
        settings[setting] = value if keep_text else parsed
    return settings


def _parse(text: str) -> Any:
    words: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
