"""Schedules: a temperature, or any number, as a function of progress in [0, 1].

All run from ``start`` at progress 0 to ``end`` at progress 1:

>>> [round(geometric(p, 1.0, 0.01), 3) for p in (0.0, 0.5, 1.0)]
[1.0, 0.1, 0.01]
>>> [round(linear(p, 1.0, 0.0), 3) for p in (0.0, 0.5, 1.0)]
[1.0, 0.5, 0.0]
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import SmartpruneError

Schedule = Callable[[float, float, float], float]


def geometric(progress: float, start: float, end: float) -> float:
    """``start * (end / start) ** progress``: equal steps of progress multiply the value by equal factors."""
    if progress >= 1:
        return end
    return float(start * (end / start) ** progress)


def paper_exponential(progress: float, start: float, end: float) -> float:
    """``start - 1 + beta ** progress`` with ``beta = 1 - start + end``: the formula as printed in the paper.

    Paper: it is undefined for ``start - end >= 1``, although the paper reports starts of 5 and 10, and is nearly linear
    below that. So :func:`geometric` is the default.
    """
    base = 1 - start + end
    if base <= 0:
        raise SmartpruneError(
            f"schedule 'paper_exponential' needs start - end < 1, got start={start:g} and end={end:g}; use schedule='geometric'"
        )
    return end if progress >= 1 else float(start - 1 + base**progress)


def inverse_exponential(progress: float, start: float, end: float) -> float:
    """``start + 1 - beta ** progress`` with ``beta = 1 + start - end``: slow at first, fast at the end."""
    return end if progress >= 1 else float(start + 1 - (1 + start - end) ** progress)


def linear(progress: float, start: float, end: float) -> float:
    """``start + (end - start) * progress``."""
    return end if progress >= 1 else start + (end - start) * progress


def fixed(progress: float, start: float, end: float) -> float:
    """Always ``start``."""
    return start


def cubic(progress: float, start: float, end: float) -> float:
    """``end + (start - end) * (1 - progress) ** 3``: fast at first, slow at the end."""
    return end if progress >= 1 else end + (start - end) * (1 - progress) ** 3


SCHEDULES: dict[str, Schedule] = {
    "geometric": geometric,
    "paper_exponential": paper_exponential,
    "linear": linear,
    "inverse_exponential": inverse_exponential,
    "fixed": fixed,
}
