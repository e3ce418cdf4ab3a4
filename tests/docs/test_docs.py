"""Runs the code blocks of the documentation, the docstrings and the examples, and checks links."""

import doctest
import importlib
import pkgutil
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers import training_jobs
from smartprune.budgets import BUDGETS
from smartprune.tasks.digits import Digits
from smartprune.training.train import train

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"  # one program in several code blocks
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != TUTORIAL]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


SNIPPETS = [pytest.param(text, id=f"{page.name}-{i}") for page in PAGES for i, text in enumerate(snippets(page))]


def user_variables() -> dict[str, object]:
    """Variables that code blocks may use: a model, data, a loss and an optimizer."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 10))
    data = [(torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2,)))] * 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return {
        "model": model,
        "loader": data,
        "criterion": nn.functional.cross_entropy,
        "optimizer": optimizer,
        "x": data[0][0],
    }


def put_stand_in_for_timm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A small network with random weights in place of timm's, and the file of images. tests/hosts runs the same code with timm."""
    timm: Any = ModuleType("timm")
    timm.create_model = lambda name, pretrained: Digits().model("resnet8")
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.chdir(folder)
    torch.save(torch.randn(64, 1, 8, 8), "images.pt")


@pytest.mark.parametrize("text", SNIPPETS)
def test_code_blocks_run(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scope = user_variables()
    if "import timm" in text:
        put_stand_in_for_timm(monkeypatch, tmp_path)
    tables: list[Any] = [sp.METHODS, BUDGETS]
    entries = [dict(table) for table in tables]
    try:
        exec(text.replace("steps=7640", "steps=6"), scope)
    finally:  # a code block may add a method or a budget
        for table, before in zip(tables, entries, strict=True):
            table.clear()
            table.update(before)
    if "bake" in text:
        assert isinstance(scope["receipt"], sp.Receipt)


def test_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("sklearn", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    scope: dict[str, object] = {}
    exec("\n".join(snippets(TUTORIAL)), scope)
    output = capsys.readouterr().out
    dense, pruned = map(float, re.findall(r"accuracy ([\d.]+) dense, ([\d.]+) pruned", output)[0])
    assert dense > 0.9
    assert pruned > 0.85


def module_names() -> list[str]:
    names = [m.name for m in pkgutil.walk_packages(sp.__path__, "smartprune.") if "triton" not in m.name]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples_run(name: str) -> None:
    if name.startswith("smartprune.integrations."):
        pytest.importorskip(name, reason="the trainer is not installed", exc_type=sp.SmartpruneError)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_example_your_loop_prunes_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(ROOT / "examples" / "your_loop.py"))["main"]
    accuracy, receipt = main(epochs=4)
    assert receipt.met
    assert accuracy > 0.5


def test_example_picture_draws_any_layer(tmp_path: Path) -> None:
    """Including a layer with partial blocks. An unknown layer name is an error."""
    pytest.importorskip("sklearn")
    image = pytest.importorskip("PIL.Image")
    train(
        training_jobs.small_config(
            tmp_path / "run", dense_epochs=1, search_epochs=1, finetune_epochs=1, block="8x4", task_settings={"width": 12}
        )
    )
    main = runpy.run_path(str(ROOT / "examples" / "picture.py"))["main"]
    main(str(tmp_path / "run"), str(tmp_path / "a.png"))
    layer = next(row for row in sp.Receipt.load(tmp_path / "run" / "receipt.json").layers if row.shape[0] % 8 and row.shape[0] > 8)
    main(str(tmp_path / "run"), str(tmp_path / "b.png"), layer.name)
    outs, ins = layer.shape[:2]
    with image.open(tmp_path / "b.png") as picture:
        assert picture.size == (2 * (6 * outs + (outs - 1) // 8) + 24, 6 * ins + (ins - 1) // 4)
    with pytest.raises(SystemExit, match="no layer 'conv99'"):
        main(str(tmp_path / "run"), str(tmp_path / "c.png"), "conv99")


def test_example_your_loop_adds_five_lines() -> None:
    lines = (ROOT / "examples" / "your_loop.py").read_text().splitlines()
    assert sum(line.endswith("# +") for line in lines) == 5


def test_lines_quoted_in_how_it_works_exist() -> None:
    """``file.py``: `line`, `line` in the last column of a table of how-it-works.md."""
    quoted = re.findall(r"\| `([\w/]+\.py)`: (.*) \|$", (ROOT / "docs" / "how-it-works.md").read_text(), re.M)
    assert len(quoted) == 10
    for file, lines in quoted:
        source = (ROOT / "src" / "smartprune" / file).read_text()
        for line in re.findall(r"`([^`]+)`", lines):
            assert line in source, f"{file}: {line}"


def test_relative_links_exist() -> None:
    for page in [ROOT / "README.md", TUTORIAL, *PAGES]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tests_that_the_page_on_trainers_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "adopt.md").read_text()))
    assert len(named) > 10
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named - defined == set()
