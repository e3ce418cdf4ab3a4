"""The README as the description of the package: links and pictures relative to the repository become absolute.

Hatchling runs this when it builds the package. The address of the repository is `Source` in `project.urls` of pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def absolute_links(text: str, source: str) -> str:
    """The text with links to files of the repository, and pictures that can be shown elsewhere."""

    def replace(match: re.Match[str]) -> str:
        kind = "raw" if match[1] else "blob"
        return f"{match[1]}[{match[2]}]({source}/{kind}/main/{match[3]})"

    return LINK.sub(replace, text)


class ReadmeHook(MetadataHookInterface):
    """Sets the field `readme` of the project."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, metadata["urls"]["Source"])}
