"""Builds the documentation site with MkDocs. The home page is the README, and the reference lists every public name."""

from __future__ import annotations

import ast
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*|"""
    r"""<link\b(?![^>]*canonical)[^>]*\bhref=["']?(?:https?:)?//[^>]*|url\(["']?(?:https?:)?//[^)]*|data-md-component="source\""""
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
ROLE = re.compile(r":(?:func|class|meth|attr|mod):`~?([^`]+)`")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)
KINDS = {  # heading of the reference -> public names
    "Pruning": ["plan", "attach", "bake", "find_pruner", "prune", "recalibrate", "saliencies", "hold", "Pruner", "Plan", "Receipt"],
    "Budgets and blocks": ["Block", "Budget", "blocks", "params", "macs", "cycles", "costs", "latency", "NPU"],
    "Methods": ["Method", "METHODS", "Smart", "Magnitude", "Gradual", "Pdp", "Pas", "Awg", "Acdc"],
    "Using the zeros": [
        "report", "verify", "pack", "unpack", "compact", "compaction", "accelerate", "export_onnx", "export_litert", "export_c",
        "save_mask", "load_mask", "bsr",
    ],
    "Operators": ["soft_topk", "hard_topk"],
    "Errors": ["SmartpruneError"],
}  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Adds the home page, the reference, and the pictures of records that pages show."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "api.md", content=reference()))
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for picture in sorted(set(re.findall(r"!\[[^\]]*\]\((?:\.\./)+(records/[^)]+)\)", pages))):
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files outside of the site lead to the repository."""
    home = page.file.src_uri == "index.md"
    folder = "." if home else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def replace(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups("")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            target = posixpath.relpath(path, "docs" if home else folder)
        elif picture:
            target = posixpath.relpath(path, posixpath.relpath(folder, "docs"))
        else:
            target = f"{SOURCE}/blob/main/{path}"
        return f"{picture}[{text}]({target}{anchor})"

    return LINK.sub(replace, markdown)


def on_post_build(config: Any) -> None:
    """The site must not load anything from the network when it is viewed."""
    site = Path(config["site_dir"])
    for path in sorted(path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")):
        if match := LOADED.search(path.read_text()):
            raise PluginError(f"{path.relative_to(site)} loads something from the network: {match[0][:200]}")


def reference() -> str:
    """The page of every public name, with the docstring of its module's object."""
    modules = public_names()
    listed = [name for names in KINDS.values() for name in names]
    missing = sorted(set(modules) - set(listed))
    assert not missing, f"docs/site.py: add {', '.join(missing)} to KINDS"
    lines = ["# Reference", "", "Everything is imported as `import smartprune as sp`.", ""]
    for heading, names in KINDS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            if name in modules:
                lines += [f"::: smartprune.{modules[name]}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def public_names() -> dict[str, str]:
    """The module of every public name, read from the package without importing it."""
    tree = ast.parse((ROOT / "src" / "smartprune" / "__init__.py").read_text())
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"]
    modules: dict[str, list[str]] = ast.literal_eval(tables[0])
    return {name: module for module, names in modules.items() for name in names}


class PlainDocstrings(griffe.Extension):
    """Shows roles as code, and doctests as Python sessions."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
