"""The shape of the code: what is public, and that the lower half never imports the upper half."""

import ast
from pathlib import Path

import smartprune as sp

SOURCE = Path(sp.__file__).parent
LOWER = (
    "verify", "report", "source", "occupancy", "receipt", "pack", "packfile", "layout", "onnx", "onnxfile", "onnxgraph", "npu",
    "npu_work", "runtime",
)  # fmt: skip
OPTIONAL = {"sklearn", "onnx", "onnxruntime", "openvino", "matplotlib", "rich", "torchvision", "lightning", "transformers"}
UPPER = (
    "pruner",
    "again",
    "agree",
    "methods",
    "masking",
    "guard",
    "topk",
    "schedule",
    "train",
    "cli",
    "tasks",
    "models",
    "run",
    "integrations",
)


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports, by their first name."""
    depth = len(path.relative_to(SOURCE).parts)
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            out |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return out


def test_public_names() -> None:
    assert sorted(sp.__all__) == sorted(set(sp.__all__))
    for name in sp.__all__:
        assert hasattr(sp, name)


def test_what_uses_the_zeros_does_not_import_what_finds_them() -> None:
    for path in SOURCE.rglob("*.py"):
        first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if first in LOWER:
            assert not imports(path) & set(UPPER), path


def test_the_mathematics_imports_no_life() -> None:
    for name in ("topk", "schedule", "block", "layers", "budget"):
        assert not imports(SOURCE / f"{name}.py") & {"pruner", "methods", "plan", "receipt", "train", "cli"}, name


def test_import_of_the_package_stays_light() -> None:
    """Optional packages are imported where they are used."""
    for path in (*SOURCE.glob("*.py"), *(SOURCE / "integrations" / f"{name}.py" for name in ("__init__", "carrier", "search"))):
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in OPTIONAL
                if "triton" not in path.name:
                    assert name.split(".")[0] != "triton", path
