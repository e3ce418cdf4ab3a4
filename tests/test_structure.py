"""The structure of the code: public names, and which package may import which, as the table in docs/architecture.md says."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import smartprune as sp

SOURCE = Path(sp.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
CORE_DEPENDENCIES = {"torch", "numpy", "safetensors"}
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCE.rglob("*.py")
}


def package_of(module: str) -> str:
    """The row of the table that a module belongs to."""
    first = module.split(".")[0]
    return first if (SOURCE / first).is_dir() else "base"


def imported_modules(module: str) -> Iterator[tuple[str, int]]:
    """Every module of this package that a module imports, wherever the import stands, with its line."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = package[: len(package) - node.level + 1]
            target = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}".lstrip(".")
                yield (inner if inner in MODULES else target), node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smartprune"):
            yield (node.module or "").removeprefix("smartprune").lstrip("."), node.lineno


def allowed_imports() -> dict[str, set[str]]:
    """The table of docs/architecture.md: package -> packages that it may import."""
    section = PAGE.read_text().split("## What may import what", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([\w, `]+)` \| (.*) \|$", section, re.M)
    table: dict[str, set[str]] = {}
    for packages, cell in rows:
        for package in packages.replace("`", "").split(", "):
            table[package] = set(re.findall(r"`(\w+)`", cell)) - {package}
    return table


def test_every_package_has_a_row() -> None:
    packages = {package_of(module) for module in MODULES if module not in ("__init__", "__main__")}
    assert set(allowed_imports()) == packages


@pytest.mark.parametrize("package", sorted(allowed_imports()))
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    allowed = allowed_imports()[package] | {package, "base"}
    wrong = [
        f"{module}:{line} imports {target}"
        for module in MODULES
        if package_of(module) == package and module not in ("__init__", "__main__")
        for target, line in imported_modules(module)
        if package_of(target) not in allowed and target
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Lazy and type-only imports count, except those of a type by the module that only names it in annotations."""
    graph = {module: {target for target, _ in imported_modules(module) if target in MODULES} - {module} for module in MODULES}
    packages: dict[str, set[str]] = {}
    for module, targets in graph.items():
        if module in ("__init__", "__main__"):
            continue
        packages.setdefault(package_of(module), set()).update(map(package_of, targets))
    order: list[str] = []
    while len(order) < len(packages):
        free = [name for name in packages if name not in order and packages[name] <= {name, *order, "base"}]
        assert free, f"a circle among {sorted(set(packages) - set(order))}"
        order += free


def test_base_modules_do_not_import_torch() -> None:
    for module, path in MODULES.items():
        if package_of(module) == "base" and module not in ("__init__", "__main__"):
            assert "torch" not in {name.split(".")[0] for name in absolute_imports(path)}, path


def absolute_imports(path: Path) -> Iterator[str]:
    """Names of what a file imports from elsewhere at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_optional_packages_are_imported_where_they_are_used(module: str) -> None:
    named_after_it = {"integrations.lightning": {"pytorch_lightning", "lightning"}, "integrations.transformers": {"transformers"}}
    allowed = CORE_DEPENDENCIES | set(sys.stdlib_module_names) | named_after_it.get(module, set())
    if module.split(".")[-1] in ("triton", "triton_kernels", "multiply_triton", "multiply_kernels", "kernel"):
        allowed |= {"triton"}
    assert {name.split(".")[0] for name in absolute_imports(MODULES[module])} <= allowed


def test_public_names_exist() -> None:
    assert sorted(sp.__all__) == sorted(set(sp.__all__))
    for name in sp.__all__:
        assert getattr(sp, name) is not None
        assert name in dir(sp)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sp.nothing  # noqa: B018


def test_import_does_not_load_torch() -> None:
    code = "import sys, smartprune; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE.parent)})


def test_the_package_can_be_sent_to_workers() -> None:
    """cloudpickle sends functions that use ``sp`` by value, and the package itself by name."""
    cloudpickle = pytest.importorskip("cloudpickle")
    namespace: dict[str, object] = {"sp": sp}
    exec("def sparsity(): return float(sp.blocks(0.5).share)", namespace)
    assert pickle.loads(cloudpickle.dumps(namespace["sparsity"]))() == 0.5
