"""Functions that tasks share."""

from __future__ import annotations

import torch

from smartprune.tasks import generator


def test_generator_differs_for_seed_and_epoch() -> None:
    draws = {torch.randint(2**60, (1,), generator=generator(s, e)).item() for s in range(5) for e in range(50)}
    assert len(draws) == 250
