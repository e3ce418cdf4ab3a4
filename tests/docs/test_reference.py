"""Every public name has a docstring with its parameters, results, errors and an example, and every public method has one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smartprune as sp

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Examples):\n((?:(?:    .*)?\n)+)", re.M)
FUNCTIONS = [name for name in sp.__all__ if inspect.isfunction(getattr(sp, name))]
CLASSES = [name for name in sp.__all__ if inspect.isclass(getattr(sp, name))]
CONTRACTS = ["Budget", "Method"]  # protocols: a user implements them
RESULTS = ["Plan", "Pruner", "Receipt"]  # made by functions, so their parameters are not for users


def sections(docstring: str | None) -> dict[str, str]:
    """The text of each section of a docstring in Google's style."""
    return dict(SECTION.findall(inspect.cleandoc(docstring or "") + "\n"))


def described(text: str) -> list[str]:
    """The names that a section describes, in order."""
    return re.findall(r"^    \*{0,2}(\w+): \S", text, re.M)


def problems(docstring: str | None, parameters: list[str]) -> Iterator[str]:
    """What the docstring of a function lacks."""
    parts = sections(docstring)
    if described(parts.get("Args", "")) != parameters:
        yield f"Args describes {described(parts.get('Args', ''))}, and the parameters are {parameters}"
    if not parts.get("Returns", "").strip():
        yield "no Returns"
    if "SmartpruneError: " not in parts.get("Raises", ""):
        yield "no Raises"
    if ">>> " not in parts.get("Examples", ""):
        yield "no Examples"


def test_every_public_name_is_checked() -> None:
    assert sorted([*FUNCTIONS, *CLASSES, "METHODS"]) == sorted(sp.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_describe_parameters_results_errors_and_an_example(name: str) -> None:
    function = getattr(sp, name)
    assert list(problems(function.__doc__, list(inspect.signature(function).parameters))) == []


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in (*CONTRACTS, *RESULTS, "SmartpruneError")])
def test_classes_describe_parameters_errors_and_an_example(name: str) -> None:
    cls = getattr(sp, name)
    parameters = list(inspect.signature(cls).parameters)
    assert [problem for problem in problems(cls.__doc__, parameters) if problem != "no Returns"] == []


@pytest.mark.parametrize("name", ["Plan", "Receipt"])
def test_results_describe_every_field(name: str) -> None:
    cls: Any = getattr(sp, name)
    assert described(sections(cls.__doc__)["Attributes"]) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("name", [*CONTRACTS, *RESULTS, "SmartpruneError"])
def test_other_classes_have_an_example(name: str) -> None:
    assert ">>> " in sections(getattr(sp, name).__doc__)["Examples"]


def test_methods_table_has_a_docstring_whose_example_runs() -> None:
    tree = ast.parse((Path(sp.__file__).parent / "methods" / "__init__.py").read_text())
    index = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "METHODS")
    text = ast.literal_eval(ast.unparse(tree.body[index + 1]))
    code = re.findall(r"^    >>> (.*)$", sections(text)["Examples"], re.M)
    scope: dict[str, Any] = {}
    exec("\n".join(code[:-1]), scope)
    assert repr(eval(code[-1], scope)) in text


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
            yield name, function


@pytest.mark.parametrize("name", ["NPU", "Block", *RESULTS])
def test_public_methods_describe_their_parameters(name: str) -> None:
    lacking = []
    for member, function in public_members(getattr(sp, name)):
        documented = described(sections(function.__doc__).get("Args", ""))
        parameters = [] if isinstance(function, property) else list(inspect.signature(function).parameters)
        if not function.__doc__ or documented != [p for p in parameters if p not in ("self", "cls")]:
            lacking.append(member)
    assert lacking == []


def test_missing_parts_are_found() -> None:
    def documented(x: int, y: int) -> None:
        """Does something.

        Args:
            x: A number.

        Examples:
            >>> 1
            1
        """

    lines = list(problems(documented.__doc__, ["x", "y"]))
    assert lines == ["Args describes ['x'], and the parameters are ['x', 'y']", "no Returns", "no Raises"]
    assert list(problems(None, [])) == ["no Returns", "no Raises", "no Examples"]
