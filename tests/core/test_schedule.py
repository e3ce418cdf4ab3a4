import itertools
import math

import pytest

from smartprune import SmartpruneError
from smartprune.core.schedule import SCHEDULES, cubic, geometric, inverse_exponential, linear, paper_exponential


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("start", "end"), [(0.5, 1e-5), (0.1, 1e-4), (1e-3, 1e-4)])
def test_schedules_fall_from_start_to_end_and_stay_positive(name: str, start: float, end: float) -> None:
    values = [SCHEDULES[name](i / 200, start, end) for i in range(201)]
    assert values[0] == pytest.approx(start)
    assert values[-1] == (start if name == "fixed" else end)
    assert all(a >= b for a, b in itertools.pairwise(values))
    assert all(value > 0 for value in values)


def test_geometric_takes_equal_times_for_equal_factors() -> None:
    below = sum(geometric(i / 10_000, 0.5, 1e-5) < 1e-3 for i in range(10_000)) / 10_000
    assert below == pytest.approx(math.log(1e-3 / 1e-5) / math.log(0.5 / 1e-5), abs=1e-3)  # 42.6 % of the steps


def test_paper_exponential_is_nearly_linear() -> None:
    away = max(abs(paper_exponential(i / 100, 0.1, 1e-5) - linear(i / 100, 0.1, 1e-5)) for i in range(101))
    assert 0 < away < 0.014 * 0.1


@pytest.mark.parametrize(("start", "end"), [(5.0, 1e-5), (10.0, 1e-5), (1.0, 0.0)])
def test_paper_exponential_raises_where_it_is_undefined(start: float, end: float) -> None:
    with pytest.raises(SmartpruneError, match=r"start - end < 1.*geometric"):
        paper_exponential(0.5, start, end)


def test_inverse_exponential_is_defined_for_large_starts() -> None:
    assert inverse_exponential(0.5, 10.0, 1e-5) > linear(0.5, 10.0, 1e-5)


def test_cubic_is_fast_at_first() -> None:
    assert cubic(0.5, 1.0, 0.0) == pytest.approx(0.125)
