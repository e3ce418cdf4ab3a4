"""Functions that configuration files name. They are imported and run only if the user names them too, or trusts the file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from ..errors import SmartpruneError
from ..models.named import is_function
from ..text import escape


def check_trusted(
    model: str,
    where: str | Path,
    named: str | None = None,
    trust: bool = False,
    remedy: str = "--trust",
    announce: Callable[[str], None] | None = None,
) -> None:
    """Raises if ``model``, which the file ``where`` names, is a function that would be imported and that only this file names.

    ``named`` is the model that the user named, and ``trust`` whether the user trusts the file. ``remedy`` is what to add.
    ``announce`` gets a line that says what is imported.

    >>> check_trusted("resnet18", "config.json")
    >>> check_trusted("package.net:build", "config.json", trust=True, announce=print)
    config.json: imports package.net and calls build
    """
    if not is_function(model):
        return
    if not trust and named != model:
        raise SmartpruneError(
            f"{where}: model is {escape(model)}, a function that would be imported and run, and only this file names it; "
            f"if you trust the file, add {remedy.format(model=shlex.quote(model))}"
        )
    if announce is not None:
        module, _, function = escape(model).partition(":")
        announce(f"{where}: imports {module} and calls {function}")
