"""Choosing between two ways to compute the same thing: both are timed, and the faster one runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 0.15  # for one comparison, if calls are short
LEAST_ROUNDS, MOST_ROUNDS = 3, 50


@dataclass(frozen=True)
class Timing:
    """The seconds of the fastest call with kernels and of the fastest call in torch."""

    kernels: float
    torch: float

    @property
    def torch_is_faster(self) -> bool:
        return self.torch < self.kernels

    def __str__(self) -> str:
        return f"{1e3 * self.torch:.3g} ms, and {1e3 * self.kernels:.3g} ms with the kernels"


def time_both(kernels: Callable[[], Any], torch: Callable[[], Any]) -> Timing:
    """Times two functions in turns, so that noise of the machine affects both. One call of each warms up."""
    kernels()
    torch()
    best = [float("inf"), float("inf")]
    rounds, end = 0, time.perf_counter() + SECONDS
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        for place, function in enumerate((kernels, torch)):
            began = time.perf_counter()
            function()
            best[place] = min(best[place], time.perf_counter() - began)
        rounds += 1
    return Timing(*best)
