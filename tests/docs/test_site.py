"""The documentation site: its navigation lists every page, and pages keep the rules that hold for all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import smartprune as sp

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAVIGATION = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
GENERATED = {"index.md", "api.md"}  # by docs/site.py: the README, and the docstrings of all public names


def test_the_navigation_lists_every_page_once() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", NAVIGATION, re.M)
    assert sorted(listed) == sorted({page.relative_to(DOCS).as_posix() for page in PAGES} | GENERATED)


def test_the_reference_lists_every_public_name_once() -> None:
    tree = ast.parse((DOCS / "site.py").read_text())  # not imported: MkDocs is installed in an environment of its own
    (kinds,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KINDS")
    listed = [name for names in ast.literal_eval(kinds).values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(sp.__all__) == set(listed)


def test_the_guides_cover_every_goal() -> None:
    goals = {"own-loop", "pretrained", "budgets", "quantization", "deploy", "several-gpus", "resume", "without-training"}
    assert goals <= {page.stem for page in (DOCS / "guides").glob("*.md")}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_page_recommends_to_prune_all_layers(page: Path) -> None:
    assert not re.search(r"""include=\[?["']\*["']""", page.read_text())


@pytest.mark.parametrize("page", [page for page in PAGES if "guides" in page.parts], ids=lambda page: page.name)
def test_every_guide_shows_code_that_the_tests_run(page: Path) -> None:
    blocks = re.findall(r"^```(\w*)$", page.read_text(), re.M)
    assert "python" in blocks
    assert set(blocks) <= {"python", "sh", ""}


def test_every_link_to_a_heading_leads_to_one() -> None:
    """Headings become anchors as on the site: lower case, without punctuation, words joined by hyphens."""
    for page in [ROOT / "README.md", *PAGES]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            linked = (page.parent / target if target else page).read_text()
            headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", linked, flags=re.S), re.M)
            slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"
