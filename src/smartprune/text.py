"""Plain-text tables and bars, for everything this package prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

GAP = 2
LEAST = 8  # a shortened column keeps this many characters


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str, width: int, shrink: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table at most ``width`` columns wide. ``align`` has one of ``<`` and ``>`` per column; the columns
    named by ``shrink`` give way, the widest first, when the table is too wide.

    >>> print("\\n".join(table(("layer", "blocks"), [("conv1", "12"), ("a.very.long.name", "7")], "<>", 19)))
    layer        blocks
    conv1            12
    a.ver..name       7
    """
    rows = [[escape(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    excess = sum(widths) + GAP * (len(widths) - 1) - width
    while excess > 0:
        widest = max(shrink, key=lambda i: widths[i])
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
        excess -= 1
    return [
        (" " * GAP).join(f"{shorten(cell, w):{a}{w}}" for cell, w, a in zip(row, widths, align, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def shorten(text: str, width: int) -> str:
    """Takes out the middle of a text that is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}..{text[len(text) - (width - head - 2) :]}"


def format_shape(shape: Sequence[int]) -> str:
    """``64x64x3x3``, as blocks are written."""
    return "x".join(map(str, shape)) if shape else "-"


def percent(part: int, whole: int) -> str:
    """A share in percent, never rounded to 0 or 100 unless it is.

    >>> percent(0, 7), percent(1, 100_000), percent(99_999, 100_000), percent(7, 7)
    ('0.00%', '0.01%', '99.99%', '100.00%')
    """
    if whole == 0 or part == 0:
        return "0.00%"
    if part == whole:
        return "100.00%"
    return f"{min(max(100 * part / whole, 0.01), 99.99):.2f}%"


def bar(part: int, whole: int, width: int, ascii_only: bool) -> str:
    """A bar as long as ``part`` of ``whole``; what is more than nothing shows, what is less than all leaves a gap.

    >>> bar(1, 1000, 6, True), bar(500, 1000, 6, True), bar(999, 1000, 6, True)
    ('#.....', '###...', '#####.')
    """
    full = 0 if whole == 0 else round(width * part / whole)
    if 0 < part < whole:
        full = min(max(full, 1), width - 1)
    ink, paper = ("#", ".") if ascii_only else ("█", "·")
    return ink * full + paper * (width - full)


def stdout_is_ascii() -> bool:
    """Whether standard output cannot show block characters."""
    return not supports_unicode(sys.stdout)


def supports_unicode(stream: object) -> bool:
    """Whether a stream can show block characters."""
    try:
        "█░▒▓·▁▂▃▄▅▆▇".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def escape(text: str) -> str:
    r"""The text with its code for every character that does not print, such as one that a terminal would obey.

    >>> escape("conv1"), escape("\x1b[2J\u202e")
    ('conv1', '\\x1b[2J\\u202e')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
