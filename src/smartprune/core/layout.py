"""Layout: how the axes of a stored weight are to be read, where a file says so."""

from __future__ import annotations

from dataclasses import dataclass

from .block import Block, Grid


@dataclass(frozen=True)
class Layout:
    """A weight stored as (out, in / groups, *kernel), or ``transposed`` as (in, out / groups, *kernel). ``parts`` are the
    groups: stretches of the first stored axis that no block crosses."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parts: int = 1
    transposed: bool = False

    def cut(self, block: Block) -> Grid:
        return block.grid(self.shape, self.parts, self.transposed)
