"""Fixtures of the promise tests: every small model of the zoo, with and without ResNet18."""

import pytest

from helpers import zoo
from helpers.training_cases import Case


@pytest.fixture(params=sorted(zoo.PROMISED))
def case(request: pytest.FixtureRequest) -> "Case":
    return Case(request.param)


@pytest.fixture(params=sorted(zoo.SMALL))
def small(request: pytest.FixtureRequest) -> "Case":
    return Case(request.param)
