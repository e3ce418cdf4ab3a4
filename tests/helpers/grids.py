"""Grids of layers of many shapes."""

from __future__ import annotations

from hypothesis import strategies as st

from helpers import products


@st.composite
def layers(draw: st.DrawFn) -> tuple[tuple[int | None, ...], list[products.Shape], bool]:
    shapes: list[products.Shape] = []
    for _ in range(draw(st.integers(1, 3))):
        axes = draw(st.integers(2, 5))
        groups = draw(st.sampled_from([1, 1, 2]))
        shape = [draw(st.integers(1, most)) for most in (7, 6, 3, 2, 2)[:axes]]
        shape[0] *= groups
        shapes.append((tuple(shape), groups, draw(st.booleans())))
    size = st.one_of(st.none(), st.integers(1, 8))
    return (draw(size), draw(size), draw(st.sampled_from([1, None]))), shapes, draw(st.booleans())
