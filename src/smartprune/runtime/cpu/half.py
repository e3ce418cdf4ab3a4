"""float16: activations and weights with scales that are powers of two, so that scaling does not round.

An activation means ``scale`` times what is stored. The largest number of the examples is stored as 4 to 8, which leaves room
for numbers 8,000 times as large; those beyond are stored as 65,504, the largest float16. The weights of an output channel are
so small that ``HALF_SUM`` products with the largest float16 still have a float16 sum. No number in between becomes infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import fx

from ..lower.steps import Step
from .abi import FLOAT16
from .arena import Value
from .entries import Entries, cut
from .instruction_sets import HALF_LANES, HALF_SUM
from .quantize import Range, finite, shared_ranges

ACTIVATION_EXPONENT = 3  # the largest number of the examples is stored as less than 2^3
WEIGHT_EXPONENT = -1 - (HALF_SUM - 1).bit_length()  # half of what fits, because sums are rounded
MOST_EXPONENT = 60  # of scales: the product of two, and their inverses, are float32 numbers


def assign_types(values: Mapping[fx.Node, Value], steps: Sequence[Step], ranges: Mapping[fx.Node, Range]) -> None:
    """Makes every activation float16, and sets its scale."""
    shared = shared_ranges(values, steps, ranges)
    for node, value in values.items():
        value.type = FLOAT16
        value.scale = float(_scales(np.abs(finite(node, shared[node], "float16")).max(), ACTIVATION_EXPONENT))


def pack(step: Step, x: Value, packed: dict[Any, Any]) -> tuple[Entries, Any, Any]:
    """The weight of a convolution: its entries, their numbers in float16, and the scale of every output channel's sums."""
    assert step.weight is not None
    key = (step.node, "float16")
    if key not in packed:
        scales = _scales(np.abs(step.weight.reshape(len(step.weight), -1)).max(axis=1), WEIGHT_EXPONENT)
        weight = (step.weight / scales.reshape(-1, *[1] * (step.weight.ndim - 1))).astype(np.float16)
        entries = cut(weight.astype(np.float32), HALF_LANES)
        packed[key] = entries, entries.values.astype(np.float16), scales
    entries, numbers, scales = packed[key]
    return entries, numbers, (scales * x.scale).astype(np.float32)


def _scales(largest: Any, exponent: int) -> Any:
    """The powers of two that divide numbers so that the largest one is less than 2^exponent, and at least half of it."""
    powers = np.frexp(np.asarray(largest, np.float64))[1] - exponent
    return np.where(largest == 0, 1.0, np.exp2(np.clip(powers, -MOST_EXPONENT, MOST_EXPONENT)))
