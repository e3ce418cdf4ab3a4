"""The method that docs/extend.md adds passes the contract test."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from methods import test_contract as contract
from smartprune.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.fixture
def added() -> Iterator[str]:
    text = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert text is not None
    lines = [line for line in text[1].splitlines() if line.strip()]
    assert len(lines) < 40
    before = dict(METHODS)
    exec(text[1], {})
    (name,) = set(METHODS) - set(before)
    yield name
    METHODS.pop(name)


def test_it_passes_the_contract(added: str) -> None:
    contract.test_a_step_leaves_no_graph(added)
    contract.test_a_step_does_not_wait_for_the_gpu(added)
    contract.test_exact_count(added, "mobilenet_block")
    contract.test_short_and_long_searches(added, 6)
    contract.test_budgets_in_costs(added, "macs")
    contract.test_mask_is_a_mask(added)
    contract.test_resuming_is_bit_exact(added, 9)
    contract.test_copies_are_masked(added, 5)
    contract.test_accumulation(added)
    contract.test_unknown_setting_lists_the_settings(added)
    contract.test_steps_that_a_gradient_scaler_skips(added, fused=False)
    contract.test_a_nan_loss_raises_in_its_step(added)
    contract.test_bfloat16(added)
    contract.test_settings_survive_json(added)
    contract.test_telemetry(added)
