"""Which modules of a source tree import which: at the top, inside functions, for type checking, and by name in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "smartprune"
MODULE_AND_NAME = re.compile(r"(\.*[a-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*")  # as in the tables of budgets and of integrations


@dataclass(frozen=True)
class Edge:
    """One import of a module of the package."""

    module: str  # the one that imports; empty for the package itself
    target: str
    line: int
    kind: str  # direct, lazy, type or text

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target} ({self.kind})"


class ImportGraph:
    """The modules below a folder, by their names without that of the package."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.paths = {
            ".".join(path.relative_to(source).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
            for path in sorted(source.rglob("*.py"))
        }
        self.public = {name: target for target, names in self._public_names() for name in names}
        self.edges = [edge for module in self.paths for edge in self._edges_of(module)]

    def row(self, module: str) -> str:
        """The row of the table that a module belongs to: its package, or base."""
        first = module.split(".")[0]
        return first if (self.source / first).is_dir() else "base"

    def rows(self) -> set[str]:
        return {self.row(module) for module in self.checked()}

    def checked(self) -> list[str]:
        """All modules but the package itself and ``__main__``, which import what users need."""
        return [module for module in self.paths if module not in ("", "__main__")]

    def wrong_edges(self, table: dict[str, set[str]]) -> list[Edge]:
        """The imports that the table does not allow. A name in a string is imported only when it is used."""
        edges = [edge for edge in self.edges if edge.module in self.checked() and edge.kind != "text"]
        return [
            edge for edge in edges if self.row(edge.target) not in {self.row(edge.module), "base"} | table[self.row(edge.module)]
        ]

    def cycles(self) -> list[str]:
        """The rows that import each other in a cycle."""
        targets: dict[str, set[str]] = {row: set() for row in self.rows()}
        for edge in self.edges:
            if edge.module in self.checked() and edge.kind != "text":
                targets[self.row(edge.module)].add(self.row(edge.target))
        waiting = set(targets)
        while free := {row for row in waiting if not (targets[row] - {row}) & waiting}:
            waiting -= free
        return sorted(waiting)

    def _edges_of(self, module: str) -> Iterator[Edge]:
        tree = ast.parse(self.paths[module].read_text())
        for node, kind in _with_kinds(tree):
            for target in self._targets(module, node):
                yield Edge(module, target, node.lineno, kind)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := MODULE_AND_NAME.fullmatch(node.value)):
                target = self._absolute(module, match[1])
                if target in self.paths:
                    yield Edge(module, target, node.lineno, "text")

    def _targets(self, module: str, node: ast.AST) -> Iterator[str]:
        """The modules that a statement or a call of ``import_module`` imports."""
        if isinstance(node, ast.Import):
            yield from (self._known(name) for alias in node.names if (name := _relative(alias.name)) is not None)
        elif isinstance(node, ast.ImportFrom):
            start = self._absolute(module, "." * node.level + (node.module or "")) if node.level else _relative(node.module or "")
            if start is not None:
                yield from (self._member(start, alias.name) for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")) and node.args:
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if isinstance(name, str) and name.startswith((".", PACKAGE)):
                yield self._known(self._absolute(module, name))

    def _absolute(self, module: str, name: str) -> str:
        """The name of a module without that of the package."""
        level = len(name) - len(name.lstrip("."))
        if not level:
            return _relative(name) or name
        is_package = self.paths[module].name == "__init__.py"
        parts = (module.split(".") if module else []) if is_package else module.split(".")[:-1]
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name.lstrip(".")])])

    def _member(self, module: str, name: str) -> str:
        """The module that ``from module import name`` loads."""
        inner = f"{module}.{name}".lstrip(".")
        if inner in self.paths:
            return inner
        return self.public.get(name, "") if not module else self._known(module)

    def _known(self, module: str) -> str:
        while module and module not in self.paths:
            module = module.rpartition(".")[0]
        return module

    def _public_names(self) -> Iterator[tuple[str, list[str]]]:
        """The modules of the public names, from the type-only imports of the package."""
        for node in ast.walk(ast.parse((self.source / "__init__.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                yield node.module or "", [alias.name for alias in node.names]


def _relative(name: str) -> str | None:
    """The name of a module without that of the package; None for modules of others."""
    return name.removeprefix(PACKAGE).lstrip(".") if name.split(".")[0] == PACKAGE else None


def _with_kinds(node: ast.AST, kind: str = "direct") -> Iterator[tuple[ast.AST, str]]:
    """All nodes below one, with the kind of an import that stands there."""
    for child in ast.iter_child_nodes(node):
        inner = kind
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and kind == "direct":
            inner = "lazy"
        yield child, kind
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for statement in child.body:
                yield statement, "type"
                yield from _with_kinds(statement, "type")
            for statement in child.orelse:
                yield statement, inner
                yield from _with_kinds(statement, inner)
        else:
            yield from _with_kinds(child, inner)
