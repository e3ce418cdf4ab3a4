"""Plain-text helpers."""

from smartprune import text


def test_bars_and_percentages_are_never_rounded_to_none_or_all() -> None:
    assert text.percent(1, 10**9) == "0.01%"
    assert text.percent(10**9 - 1, 10**9) == "99.99%"
    assert text.percent(0, 0) == "0.00%"
    assert text.bar(0, 10, 5, True) == "....."
    assert text.bar(10, 10, 5, True) == "#####"
    assert text.bar(0, 0, 5, True) == "....."
    for width in range(2, 40):
        assert len(text.shorten("a" * 100, width)) == width
    assert text.format_shape(()) == "-"
