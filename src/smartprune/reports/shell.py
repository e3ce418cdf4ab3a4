"""The shell of a page: one file with its style, its script and its data inside, that asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..text import escape

HERE = Path(__file__).parent


def page(title: str, body: str, data: object) -> str:
    """A whole HTML document. Its policy lets no request out and no script run but its own, whatever stands in ``body``."""
    script, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<title>{words(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<div class="frame">
{body}
</div>
<span id="probe" hidden></span>
<script type="application/json" id="data">{as_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def words(text: object) -> str:
    """Any text for HTML. What does not print, such as marks that turn the direction of writing, is shown as its code.

    >>> words('a<b & "c"'), words("\\u202etxt.exe")
    ('a&lt;b &amp; &quot;c&quot;', '\\\\u202etxt.exe')
    """
    return html.escape(escape(str(text)))


def name(text: object) -> str:
    """A name of somebody else's, kept from changing the direction of what stands around it."""
    return f'<bdi class="name">{words(text).replace(".", ".<wbr>")}</bdi>'


def as_json(data: object) -> str:
    """JSON that ends no script element, whatever it holds."""
    found = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return found.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pairs(rows: Iterable[tuple[str, object]], label: str) -> str:
    """A table of names and values; its cells are escaped."""
    lines = "".join(f'<tr><th scope="row">{words(key)}</th><td>{words(value)}</td></tr>' for key, value in rows)
    return f'<table aria-label="{words(label)}"><tbody>{lines}</tbody></table>'


def tiles(found: Sequence[tuple[str, str, str]]) -> str:
    """Figures side by side: label, value, and what stands below it; all escaped."""
    cells = "".join(
        f'<div><dt>{words(label)}</dt><dd><div class="big">{words(value)}</div><div class="small">{words(below)}</div></dd></div>'
        for label, value, below in found
    )
    return f'<dl class="tiles">{cells}</dl>'


def header(kicker: str) -> str:
    return f'<header><p class="kicker">{words(kicker)}</p><button id="theme" type="button">Dark</button></header>'
