"""Plain-text tables and bars for terminal output and messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction

GAP = 2  # spaces between columns
MIN_COLUMN = 8  # a column is never shortened below this width


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str, width: int, shrink: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table that is at most ``width`` characters wide.

    ``align`` has one ``<`` or ``>`` per column. If the table is too wide, the columns listed in ``shrink`` are shortened,
    the widest first.

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
        if widths[widest] <= MIN_COLUMN:
            break
        widths[widest] -= 1
        excess -= 1
    return [
        (" " * GAP).join(f"{shorten(cell, w):{a}{w}}" for cell, w, a in zip(row, widths, align, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def shorten(text: str, width: int) -> str:
    """Removes the middle of a text that is longer than ``width``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}..{text[len(text) - (width - head - 2) :]}"


def show(value: object, width: int = 60) -> str:
    """A value for an error message, in one short line. Of objects such as models and tensors, it is the class.

    >>> show("smrat"), show(0.5), show(float), show(open)
    ("'smrat'", '0.5', 'float', '<builtin_function_or_method>')
    """
    if isinstance(value, type):
        return value.__name__
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tuple, list, Fraction)):
        return escape(shorten(repr(value), width))
    return f"<{type(value).__name__}>"


def format_shape(shape: Sequence[int]) -> str:
    """A shape as ``64x64x3x3``, the way blocks are written."""
    return "x".join(map(str, shape)) if shape else "-"


def percent(part: int, whole: int) -> str:
    """A share in percent. It reads 0.00% or 100.00% only if it is exactly that.

    >>> percent(0, 7), percent(1, 100_000), percent(99_999, 100_000), percent(7, 7)
    ('0.00%', '0.01%', '99.99%', '100.00%')
    """
    if whole == 0 or part == 0:
        return "0.00%"
    if part == whole:
        return "100.00%"
    return f"{min(max(100 * part / whole, 0.01), 99.99):.2f}%"


def csv_cell(value: object) -> object:
    """A value for a CSV file. Characters that do not print become escape sequences, and a text that a spreadsheet would run as a
    formula gets a leading apostrophe. Numbers stay numbers.

    >>> csv_cell("=1+1"), csv_cell("-x"), csv_cell(-0.5), csv_cell("smart")
    ("'=1+1", "'-x", -0.5, 'smart')
    """
    if not isinstance(value, str):
        return value
    return ("'" if value.startswith(("=", "+", "-", "@")) else "") + escape(value)


def bar(part: int, whole: int, width: int, ascii_only: bool) -> str:
    """A bar that shows ``part`` of ``whole``. It is empty or full only if ``part`` is 0 or ``whole``.

    >>> bar(1, 1000, 6, True), bar(500, 1000, 6, True), bar(999, 1000, 6, True)
    ('#.....', '###...', '#####.')
    """
    filled = 0 if whole == 0 else round(width * part / whole)
    if 0 < part < whole:
        filled = min(max(filled, 1), width - 1)
    full, empty = ("#", ".") if ascii_only else ("█", "·")
    return full * filled + empty * (width - filled)


def some_names(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list, and how many there are besides.

    >>> some_names(["a", "b"]), some_names(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return escape(", ".join(names[:most])) + more


def counted(number: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "layer"), counted(1200, "layer")
    ('1 layer', '1,200 layers')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException) -> str:
    """The first line of an error message, or the type of the error if it has none.

    >>> first_line(ValueError("wrong\\nin detail")), first_line(KeyError())
    ('wrong', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


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
    r"""Replaces characters that do not print, such as terminal control codes, by their escape sequences.

    >>> escape("conv1"), escape("\x1b[2J\u202e")
    ('conv1', '\\x1b[2J\\u202e')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
