"""How much of a difference between two accuracies may be chance."""

from __future__ import annotations

import math

CONFIDENCE = 1.96  # standard errors on each side: about 95 % of all test splits of this size


def accuracy_noise(dense: float, pruned: float, samples: float) -> float:
    """Half the width of the 95 % interval of the difference (Agresti and Caffo), if the models were tested on independent samples.
    They are tested on the same samples, which makes the real interval narrower, so this is an upper bound for one test split. The
    spread between seeds is not included, because one run does not show it.

    >>> round(accuracy_noise(0.95, 0.94, 10_000), 4)
    0.0063
    """
    shares = [(value * samples + 1) / (samples + 2) for value in (dense, pruned)]  # above 0 for perfect models, too
    return CONFIDENCE * math.sqrt(sum(value * (1 - value) for value in shares) / (samples + 2))
