"""The files around the package: versions, extras and workflows agree with the code and the Makefile."""

from __future__ import annotations

import re
import runpy
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import smartprune

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
CALLERS = [ROOT / ".ci" / "run", *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]


def extra(name: str) -> set[str]:
    """The names of the packages of an extra, including those of the extras that it names."""
    packages: set[str] = set()
    for requirement in PROJECT["project"]["optional-dependencies"][name]:
        included = re.fullmatch(r"smartprune\[([\w,]+)\]", requirement)
        if included is not None:
            packages |= {package for other in included[1].split(",") for package in extra(other)}
        else:
            packages.add(re.split(r"[<>=; ]", requirement)[0])
    return packages


@pytest.mark.parametrize("caller", CALLERS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile(caller: Path) -> None:
    called = set(re.findall(r"\bmake ([a-z]+)", re.sub(r"#.*", "", caller.read_text())))
    assert called
    assert called <= TARGETS


def test_the_makefile_describes_every_target() -> None:
    described = set(re.findall(r"^# make ([a-z]+)", MAKEFILE, re.M))
    assert described == set(re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.M)[0].split()) - {"lint", "clean"}


def test_the_demo_installs_no_gpu_compiler_and_no_test_tools() -> None:
    assert extra("demo") == {"scikit-learn", "onnx", "onnxscript", "onnxruntime"}


def test_the_tests_install_what_every_extra_needs() -> None:
    optional = {"plot", "digits", "pictures", "detection", "onnx", "litert", "track", "demo", "notebook"}
    assert set().union(*(extra(name) for name in optional)) <= extra("test")


def test_the_core_needs_three_packages() -> None:
    names = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "safetensors"}


def test_no_build_step_installs_torch() -> None:
    """An isolated build environment would download the CUDA build."""
    assert PROJECT["build-system"]["requires"] == ["hatchling>=1.25"]


def test_the_badges_state_what_the_project_file_states() -> None:
    pictures = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    assert (ROOT / "docs" / "badges.svg").read_text() == pictures["badges"]()
    assert "3.11, 3.12" in pictures["badges"]()


def test_the_picture_of_a_terminal_shows_what_the_terminal_showed() -> None:
    shown = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["shown"]
    written = "loading\r\n\r\x1b[Kdense 1/2\r\x1b[Kdense 2/2\r\n\r\x1b[Ksearch 1/2\r\x1b[Ksearch 2/2\r\n\r\x1b[Kdone\r\n"
    assert shown(written) == "loading\ndense 2/2\nsearch 2/2\ndone\n"
    assert shown(written, 0.6) == "loading\ndense 2/2\nsearch 1/2"


def test_links_of_the_description_of_the_package_are_absolute() -> None:
    pytest.importorskip("hatchling")
    absolute_links = runpy.run_path(str(ROOT / ".ci" / "readme.py"))["absolute_links"]
    text = absolute_links((ROOT / "README.md").read_text(), "https://example.org/p")
    assert not re.findall(r"\]\((?!https?:)[^)]*", text)
    assert "![The report page of a pruned network](https://example.org/p/raw/main/docs/report.png)" in text
    assert "(https://example.org/p/blob/main/docs/tutorial.md)" in text


def test_types_are_published() -> None:
    assert (ROOT / "src" / "smartprune" / "py.typed").exists()


def test_the_workflow_runs_every_declared_version_of_python() -> None:
    declared = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"])))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    run = set(re.findall(r"python: \[(.*)\]", workflow)[0].replace('"', "").replace(" ", "").split(","))
    assert run == declared


def released(text: str, pattern: str) -> tuple[str, date]:
    """The version and the date that a file states."""
    match = re.search(pattern, text, re.M)
    assert match is not None
    return match[1], date.fromisoformat(match[2])


def test_the_changelog_and_the_citation_name_the_version_and_its_date() -> None:
    changelog = released((ROOT / "CHANGELOG.md").read_text(), r"\A# Changelog\n(?:[^#].*\n|\n)*## (\S+) \((\S+)\)$")
    citation = released((ROOT / "CITATION.cff").read_text(), r"^version: (\S+)\ndate-released: (\S+)$")
    assert changelog == citation
    assert changelog[0] == smartprune.__version__


def test_pre_commit_hooks_run_the_commands_of_make_lint() -> None:
    hooks = set(re.findall(r"entry: \.venv/bin/(\w+(?: \w+)?)", (ROOT / ".pre-commit-config.yaml").read_text()))
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe is not None
    assert hooks == set(re.findall(r"\$\(BIN\)/(\w+(?: format| check)?)", recipe[1]))


def test_the_page_on_versions_names_what_the_workflow_runs() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for name in ("python", "torch"):
        versions = re.findall(rf"{name}: \[(.*)\]", workflow)[0].replace('"', "").replace(" ", "").split(",")
        row = re.search(rf"^\| {'PyTorch' if name == 'torch' else 'Python'} \|(.*)\|$", page, re.M)
        assert row is not None
        assert all(re.search(rf"\b{re.escape(version.removesuffix('.0'))}\b", row[1]) for version in versions), name
    least = re.search(r"torch>=([\d.]+)", "".join(PROJECT["project"]["dependencies"]))
    assert least is not None
    assert least[1] == min(re.findall(r"\d\.\d+", workflow.partition("torch: [")[2].partition("]")[0]))


def test_the_oldest_versions_are_the_lower_bounds_of_every_package_that_the_tests_use() -> None:
    lowest = runpy.run_path(str(ROOT / ".ci" / "lowest.py"))["lowest"](PROJECT["project"])
    names = [pin.partition("==")[0] for pin in lowest]
    assert len(names) == len(set(names)), "a package has two lower bounds"
    assert set(names) == (extra("test") | {"numpy", "safetensors"}) - {"triton"}
    assert "numpy==1.26" in lowest
