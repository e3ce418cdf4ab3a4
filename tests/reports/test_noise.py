"""The noise of a difference between two accuracies, compared with simulated test splits."""

from __future__ import annotations

import numpy as np
import pytest

from smartprune.reports.noise import accuracy_noise


@pytest.mark.parametrize(("share", "samples"), [(0.9, 200), (0.99, 539), (0.5, 50)])
def test_about_95_percent_of_simulated_differences_lie_within_the_noise(share: float, samples: int) -> None:
    random = np.random.default_rng(0)
    dense, pruned = (random.binomial(samples, share, 20_000) / samples for _ in range(2))
    within = [abs(a - b) <= accuracy_noise(a, b, samples) for a, b in zip(dense.tolist(), pruned.tolist(), strict=True)]
    assert 0.94 < np.mean(within) < 0.99


def test_two_perfect_models_are_not_without_noise() -> None:
    assert 0.005 < accuracy_noise(1.0, 1.0, 500) < 0.02
