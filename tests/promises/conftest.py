"""The promises are kept over the same models: the small ones of the zoo, and ResNet18."""

import pytest

from helpers import zoo
from helpers.training_cases import Case


@pytest.fixture(params=sorted(zoo.PROMISED))
def case(request: pytest.FixtureRequest) -> "Case":
    return Case(request.param)


@pytest.fixture(params=sorted(zoo.SMALL))
def small(request: pytest.FixtureRequest) -> "Case":
    return Case(request.param)
