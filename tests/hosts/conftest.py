"""Set-up of the tests on models of other packages."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of other packages are not errors here."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
