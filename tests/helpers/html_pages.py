"""Reads the HTML pages of reports."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class HtmlPage(HTMLParser):
    """The elements of a page with their attributes, the content of its scripts, and its other text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and not self.scripts[-1]:
            self.scripts[-1] = data
        else:
            self.text += data

    @property
    def data(self) -> Any:
        """The data that the page's script reads."""
        return json.loads(self.scripts[0])


def read_page(path: Path) -> HtmlPage:
    return HtmlPage(path.read_text(encoding="utf-8"))
