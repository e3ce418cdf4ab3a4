"""Uses of weights and MACs, measured in one call."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from smartprune.core.layers import Layer
from smartprune.core.usage import measure


def count_macs(model: nn.Module, example: Any) -> int:
    """MACs of the model for one sample of ``example``."""
    return measure(model, example).macs


def count_uses(model: nn.Module, layers: Sequence[Layer], example: Any) -> dict[str, tuple[int, ...]]:
    """How often each element of a layer's weight is used for one sample, by layer name."""
    usage = measure(model, example)
    return {layer.name: usage.uses(layer) for layer in layers}
