"""The frame of an HTML page: one file that holds its style, script and data, and makes no network requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..text import escape

HERE = Path(__file__).parent
MIDDLE_DOT = "\u00b7"
SCRIPTS = ("page.js", "block_map.js")  # in this order, in one script


def html_page(title: str, body: str, data: object) -> str:
    """A complete HTML document. Its security policy blocks requests and all scripts except its own."""
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<title>{html_text(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<div class="frame">
{body}
</div>
<span id="probe" hidden></span>
<script type="application/json" id="data">{html_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def html_text(text: object) -> str:
    """Any text for HTML. Characters that do not print, such as direction marks, are shown as their codes.

    >>> html_text('a<b & "c"'), html_text("\\u202etxt.exe")
    ('a&lt;b &amp; &quot;c&quot;', '\\\\u202etxt.exe')
    """
    return html.escape(escape(str(text)))


def html_name(text: object) -> str:
    """A name from the model, isolated so that it cannot change the direction of the text around it."""
    return f'<bdi class="name">{html_text(text).replace(".", ".<wbr>")}</bdi>'


def html_json(data: object) -> str:
    """JSON that cannot end the script element that holds it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pairs_table(rows: Iterable[tuple[str, object]], label: str) -> str:
    """A table of names and values, which are escaped here."""
    lines = "".join(f'<tr><th scope="row">{html_text(key)}</th><td>{html_text(value)}</td></tr>' for key, value in rows)
    return f'<table aria-label="{html_text(label)}"><tbody>{lines}</tbody></table>'


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Key figures side by side, each with a label, a value and a note, which are escaped here."""
    cells = "".join(
        f'<div><dt>{html_text(label)}</dt><dd><div class="big">{html_text(value)}</div>'
        f'<div class="small">{html_text(note)}</div></dd></div>'
        for label, value, note in entries
    )
    return f'<dl class="tiles">{cells}</dl>'


def origin_line(parts: Sequence[str], command: str = "") -> str:
    """Facts about the origin of a page and the command that made it, escaped here, or nothing."""
    entries = [html_text(part) for part in parts] + ([f"<code>{html_text(command)}</code>"] if command else [])
    return f'<p class="note origin">{f" {MIDDLE_DOT} ".join(entries)}</p>' if entries else ""


def header(kicker: str) -> str:
    return f'<header><p class="kicker">{html_text(kicker)}</p><button id="theme" type="button">Dark</button></header>'
