"""The structure of the code: public names, the imports that docs/architecture.md allows, and tests that mirror the modules."""

from __future__ import annotations

import ast
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import smartprune as sp
from helpers.import_graph import ImportGraph

TESTS = Path(__file__).parent
SOURCE = Path(sp.__file__).parent
PAGE = TESTS.parent / "docs" / "architecture.md"
CORE_DEPENDENCIES = {"torch", "numpy", "safetensors"}
REGISTRIES = {"budgets", "integrations"}  # tables that name classes as strings, so that listing them loads nothing
GRAPH = ImportGraph(SOURCE)
TORCH_NAMES = set(dir(nn.Module()))


def allowed_imports() -> dict[str, set[str]]:
    """The table of docs/architecture.md: package -> packages that it may import."""
    section = PAGE.read_text().split("## What may import what", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    return {package: set(re.findall(r"`(\w+)`", cell)) for package, cell in rows}


TABLE = allowed_imports()


def test_every_package_has_a_row() -> None:
    assert set(TABLE) == GRAPH.rows()
    assert set().union(*TABLE.values()) <= set(TABLE)


@pytest.mark.parametrize("package", sorted(TABLE))
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    wrong = [edge for edge in GRAPH.wrong_edges(TABLE) if GRAPH.row(edge.module) == package]
    assert not wrong, "\n".join(map(str, wrong))


def test_only_the_tables_of_classes_name_modules_in_strings() -> None:
    assert {edge.module for edge in GRAPH.edges if edge.kind == "text"} == REGISTRIES


def test_packages_do_not_import_each_other_in_a_cycle() -> None:
    assert GRAPH.cycles() == []


VIOLATIONS = {
    "direct": ("core/block.py", "from ..pruning import plan\n", "core.block", "pruning.plan", "direct"),
    "absolute": ("core/block.py", "import smartprune.methods.smart\n", "core.block", "methods.smart", "direct"),
    "from the package": ("core/block.py", "from smartprune import accelerate\n", "core.block", "runtime", "direct"),
    "whole package": ("core/block.py", "def lazy():\n    import smartprune\n", "core.block", "", "lazy"),
    "public name": ("core/block.py", "from .. import attach\n", "core.block", "pruning.attach", "direct"),
    "lazy": ("hardware/npu.py", "def lazy():\n    from ..reports.table import report\n", "hardware.npu", "reports.table", "lazy"),
    "dynamic": (
        "topk/cpu.py",
        "def lazy():\n    return importlib.import_module('smartprune.training.train')\n",
        "topk.cpu",
        "training.train",
        "lazy",
    ),
    "type": ("tasks/task.py", "if TYPE_CHECKING:\n    from ..training.run import Run\n", "tasks.task", "training.run", "type"),
    "base": ("text.py", "from .core import block\n", "text", "core.block", "direct"),
    "sibling": ("models/resnet.py", "from ..tasks.task import Data\n", "models.resnet", "tasks.task", "direct"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "csrc")
    return Path(shutil.copytree(SOURCE, tmp_path_factory.mktemp("copy") / "smartprune", ignore=ignore))


def test_every_kind_of_forbidden_import_is_found(copy: Path) -> None:
    """The tests above fail on a copy of the code with more imports."""
    for file, code, *_ in VIOLATIONS.values():
        (copy / file).write_text((copy / file).read_text() + "\n" + code)
    edges = [(edge.module, edge.target, edge.kind) for edge in ImportGraph(copy).wrong_edges(TABLE)]
    assert sorted(edges) == sorted((module, target, kind) for _, _, module, target, kind in VIOLATIONS.values())


def test_a_cycle_of_packages_is_found(copy: Path) -> None:
    (copy / "core" / "kinds.py").write_text("def lazy():\n    from ..topk import soft_topk\n")
    assert {"core", "topk"} <= set(ImportGraph(copy).cycles())


def private_attributes(source: Path) -> list[str]:
    """Uses of a private attribute of the code outside of the package that defines it. Attributes of torch are not counted."""
    defined: dict[str, set[str]] = {}
    used: list[tuple[str, str, int]] = []
    for path in sorted(source.rglob("*.py")):
        package = path.relative_to(source).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
            if isinstance(node, ast.Attribute):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                names = [node.attr] if is_own and isinstance(node.ctx, ast.Store) else []
                used += [] if is_own else [(node.attr, package, node.lineno)]
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name not in TORCH_NAMES:
                    defined.setdefault(name, set()).add(package)
    wrong = [(name, package, line) for name, package, line in used if name in defined and package not in defined[name]]
    return [f"{package}, line {line}: {name} belongs to {', '.join(sorted(defined[name]))}" for name, package, line in wrong]


def test_private_attributes_stay_in_their_package() -> None:
    assert private_attributes(SOURCE) == []


def test_a_private_attribute_of_another_package_is_found(copy: Path) -> None:
    with (copy / "training" / "step.py").open("a") as file:
        file.write("\n\ndef touch(pruner: Any) -> None:\n    pruner.search._has_moved()\n")
    (wrong,) = private_attributes(copy)
    assert wrong.startswith("training, line ")
    assert wrong.endswith(": _has_moved belongs to pruning")


def test_private_names_stay_in_their_module() -> None:
    wrong = []
    for module in GRAPH.checked():
        for node in ast.walk(ast.parse(GRAPH.paths[module].read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("smartprune")):
                private = [alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")]
                wrong += [f"{module}:{node.lineno} imports {name}" for name in private]
    assert not wrong, "\n".join(wrong)


def test_base_modules_do_not_import_torch() -> None:
    base = [path for module, path in GRAPH.paths.items() if GRAPH.row(module) == "base"]
    assert len(base) > 5
    code = "import sys; import " + ", ".join(f"smartprune.{path.stem}" for path in base if not path.stem.startswith("__"))
    subprocess.run(
        [sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True, env={"PYTHONPATH": str(SOURCE.parent)}
    )


# Modules without a test module of their own, and the tests that check them. A module of constants alone, or one whose parts only
# work together, is tested through what uses it.
TESTED_IN = {
    "artifacts/compact_apply": "artifacts/test_compact_layers.py",  # all networks go through these modules
    "artifacts/compact_choose": "artifacts/test_compact_layers.py",
    "artifacts/compact_files": "cli/test_compact.py",  # the file that the command writes
    "artifacts/compact_graph": "artifacts/test_compact_layers.py",
    "artifacts/compact_report": "artifacts/test_compact.py",
    "artifacts/compact_rules": "artifacts/test_compact_layers.py",
    "artifacts/counts": "artifacts/test_receipt.py",  # the parts of a receipt
    "artifacts/tensors": "artifacts/test_source.py",  # the sources of these tensors
    "artifacts/torch_pickle": "artifacts/test_torch_file.py",  # the file around it
    "artifacts/litert_composed": "artifacts/test_litert_ops.py",
    "artifacts/litert_file": "artifacts/test_litert_read.py",
    "artifacts/litert_graph": "artifacts/test_litert_layers.py",
    "artifacts/litert_run": "artifacts/test_litert.py",
    "artifacts/litert_translate": "artifacts/test_litert_ops.py",
    "cli/budget": "cli/test_inspect.py",  # the flags of plan
    "cli/common": "cli/test_cli.py",  # what all commands share
    "cli/models": "cli/test_inspect.py",  # --model and --example
    "cli/signals": "cli/test_train.py",  # runs that are interrupted
    "core/sharding": "promises/test_7_ranks.py",  # several processes
    "experiments/bench/adapters": "experiments/bench/test_engines.py",  # the engines that it wraps
    "integrations/state": "integrations/test_integrations.py",  # all trainers
    "methods/__init__": "methods/test_contract.py",
    "models/bisenetv2": "models/test_models.py",  # all networks
    "models/densenet": "models/test_models.py",
    "models/googlenet": "models/test_models.py",
    "models/mobilenetv2": "models/test_models.py",
    "models/resnet": "models/test_models.py",
    "models/resnet50": "models/test_models.py",
    "models/yolov5m": "models/test_models.py",
    "models/__init__": "models/test_models.py",
    "pruning/attach": "promises/test_10_no_silent_misuse.py",  # its arguments and errors
    "pruning/calibration": "methods/test_awg.py",  # the method that calibrates
    "pruning/consensus": "promises/test_7_ranks.py",  # several processes
    "pruning/copies": "promises/test_4_copies.py",
    "pruning/hold": "promises/test_5_hold.py",
    "pruning/oneshot/job": "pruning/oneshot/test_prune.py",  # the steps together
    "pruning/hooks": "promises/test_3_your_objects.py",
    "pruning/masked": "promises/test_3_your_objects.py",
    "pruning/multiply_kernels": "pruning/test_multiply_triton.py",  # the launches
    "pruning/plan_text": "pruning/test_plan.py",
    "pruning/state": "pruning/test_pruner.py",
    "pruning/zeros": "promises/test_5_zeros_stay_zero.py",
    "recipe": "tasks/test_tasks.py",  # fields without functions
    "reports/__init__": "reports/test_table.py",  # report() and its result
    "reports/block_map": "reports/test_figures.py",
    "reports/layer_table": "reports/test_page.py",  # parts of the page
    "reports/shell": "reports/test_page.py",
    "reports/summary": "reports/test_page.py",
    "runtime/__init__": "runtime/test_module.py",
    "runtime/c_source/check": "runtime/c_source/test_export.py",  # the comparison at the end of an export
    "runtime/c_source/graph": "runtime/c_source/test_export.py",
    "runtime/cpu/arena": "runtime/cpu/test_program.py",  # the parts of a program
    "runtime/cpu/compiled": "runtime/cpu/test_program.py",
    "runtime/cpu/pool": "runtime/cpu/test_program.py",
    "runtime/gpu/kernel": "runtime/gpu/test_layers.py",
    "runtime/lower/__init__": "runtime/cpu/test_program.py",
    "runtime/lower/context": "runtime/cpu/test_program.py",
    "runtime/lower/elementwise": "runtime/cpu/test_program.py",
    "runtime/lower/fuse": "runtime/cpu/test_program.py",
    "runtime/lower/handlers": "runtime/cpu/test_program.py",
    "runtime/lower/layers": "runtime/cpu/test_program.py",
    "runtime/lower/moves": "runtime/c_source/test_rewrite.py",
    "runtime/lower/pooling": "runtime/cpu/test_program.py",
    "runtime/lower/steps": "runtime/cpu/test_program.py",
    "runtime/partition": "runtime/test_module.py",
    "runtime/trace/tracer": "runtime/trace/test_inputs.py",
    "tasks/__init__": "tasks/test_tasks.py",
    "tasks/bccd": "tasks/test_detection.py",  # a name and settings of a task
    "tasks/camvid": "tasks/test_segmentation.py",
    "tasks/cifar10_files": "tasks/test_cifar10.py",
    "tasks/images": "tasks/test_imagefolder.py",
    "tasks/segmentation_files": "tasks/test_segmentation.py",
    "tasks/voc07sub": "tasks/test_detection.py",
    "topk/__init__": "topk/test_topk.py",
    "topk/triton_kernels": "topk/test_triton.py",  # the launches
    "training/page": "reports/test_page.py",
    "training/trust": "cli/test_trust.py",
    "cli/__init__": "cli/test_cli.py",
    "integrations/__init__": "integrations/test_integrations.py",
}
LONG = {  # lines without the docstring, and why
    "forward_kernel": "one launch does it all: each further launch would cost more than the passes",
}


def without_own_tests() -> dict[str, str]:
    """The modules with code that have no test module in the same place, and where that would be."""
    out = {}
    for module, path in GRAPH.paths.items():
        body = [node for node in ast.parse(path.read_text()).body if not ast.unparse(node).startswith("__all__")]
        has_code = any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)) for node in body)
        if module in ("", "__main__") or not has_code:
            continue
        relative = path.relative_to(SOURCE)
        folder = relative.parent if len(relative.parts) > 1 else Path("base")
        mirrored = folder / f"test_{path.stem}.py"
        if not (TESTS / mirrored).exists():
            out[str(relative.with_suffix(""))] = str(mirrored)
    return out


def test_tests_mirror_the_modules() -> None:
    missing = without_own_tests()
    untested = [
        f"{module}: add tests/{file}, or a line to TESTED_IN" for module, file in missing.items() if module not in TESTED_IN
    ]
    assert not untested, "\n".join(untested)
    assert sorted(set(TESTED_IN) - set(missing)) == [], "these modules have tests of their own, or do not exist"
    assert [file for file in TESTED_IN.values() if not (TESTS / file).exists()] == []


def test_files_and_functions_are_short() -> None:
    too_long, long_functions = [], set()
    for path in GRAPH.paths.values():
        source = path.read_text()
        if (lines := len(source.splitlines())) > 400:
            too_long.append(f"{path}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                if (lines := (node.end_lineno or 0) - first.lineno + 1) > 60 and node.name in LONG:
                    long_functions.add(node.name)
                elif lines > 60:
                    too_long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    too_long += [f"{path}: more than 400 lines" for path in SOURCE.rglob("*.[ch]") if len(path.read_text().splitlines()) > 400]
    assert not too_long, "\n".join(too_long)
    assert long_functions == set(LONG)


def absolute_imports(path: Path) -> Iterator[str]:
    """Names of what a file imports from elsewhere at its top level."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


@pytest.mark.parametrize("module", sorted(GRAPH.paths))
def test_optional_packages_are_imported_where_they_are_used(module: str) -> None:
    named_after_it = {"integrations.lightning": {"pytorch_lightning", "lightning"}, "integrations.transformers": {"transformers"}}
    allowed = CORE_DEPENDENCIES | set(sys.stdlib_module_names) | named_after_it.get(module, set())
    if module.split(".")[-1] in ("triton", "triton_kernels", "multiply_triton", "multiply_kernels", "kernel"):
        allowed |= {"triton"}
    assert {name.split(".")[0] for name in absolute_imports(GRAPH.paths[module])} <= allowed


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


SENT = """
import smartprune as sp


def sparsity() -> float:
    return float(sp.blocks(0.5).share)


class Trainer:
    method = sp.Smart
    package = sp

    def run(self) -> float:
        return float(sp.params(0.25).share)


lookup = lambda name: getattr(sp, name).__name__
"""


def test_the_package_can_be_sent_to_workers(tmp_path: Path) -> None:
    """Cloudpickle sends functions and classes of a script by value, and the package that they use by name."""
    cloudpickle = pytest.importorskip("cloudpickle")
    assert pickle.loads(cloudpickle.dumps(sp)) is sp
    script, file = tmp_path / "script.py", tmp_path / "sent.pickle"
    script.write_text(
        SENT + f"import cloudpickle\nopen({str(file)!r}, 'wb').write(cloudpickle.dumps((sp, sparsity, Trainer(), lookup)))\n"
    )
    environment = {"PYTHONPATH": str(SOURCE.parent)}
    subprocess.run([sys.executable, str(script)], check=True, env=environment)
    code = (
        f"import pickle; sp, sparsity, trainer, lookup = pickle.load(open({str(file)!r}, 'rb')); "
        "assert (sparsity(), trainer.run(), lookup('Pruner')) == (0.5, 0.25, 'Pruner'); "
        "assert trainer.package is sp and trainer.method is sp.Smart and sp.__name__ == 'smartprune'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
