"""The distance between the outputs of two classifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.slow_distance import slow_distance
from smartprune.tasks.distance import soft_distance


@pytest.mark.parametrize("shape", [(5, 7), (2, 4, 3, 5)])
def test_distance_matches_a_slow_loop(shape: tuple[int, ...]) -> None:
    out, target = torch.randn(shape).double(), torch.randn(shape).double()
    last = [np.moveaxis(tensor.numpy(), 1, -1) for tensor in (out, target)]
    assert float(soft_distance(out, target, 3.0)) == pytest.approx(slow_distance(*last, 3.0), rel=1e-5)
    assert float(soft_distance((out, target), [target], 3.0)) == pytest.approx(slow_distance(*last, 3.0), rel=1e-5)  # first heads
    assert float(soft_distance(out, out, 3.0)) == pytest.approx(0, abs=1e-6)
