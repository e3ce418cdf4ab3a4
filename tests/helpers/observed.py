"""What a run of an example shows, by the names of layers."""

from __future__ import annotations

from torch import nn

from smartprune.core.block import Block
from smartprune.core.layers import candidates, find_layers
from smartprune.core.observe import observe

BLOCK = Block(4, 4)


def names(model: nn.Module, example: object, fact: str) -> set[str]:
    """The layers of which a fact holds."""
    ids = getattr(observe(model, example), fact)
    return {candidate.name for candidate in candidates(model) if id(candidate.weight) in ids}


def reasons(model: nn.Module, example: object, **options: object) -> dict[str, str]:
    """Why layers are skipped, with what the run shows."""
    skipped = find_layers(model, BLOCK, facts=observe(model, example), **options)[1]  # type: ignore[arg-type]
    return {layer.name: layer.reason for layer in skipped}
