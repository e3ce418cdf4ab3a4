"""The table of budgets: names, units and labels, without loading torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest

import smartprune
from smartprune.budgets import BUDGETS, budget_fields, budget_label, budget_names, budget_unit, removal
from smartprune.core.budget import Budget


@dataclass(frozen=True)
class Heat:
    share: Fraction
    sensor: str = "a"
    kind: ClassVar[str] = "heat"
    unit: ClassVar[str] = "J"
    label: ClassVar[str] = "heat"


@pytest.fixture
def heat() -> Iterator[None]:
    BUDGETS["heat"] = Heat
    yield
    del BUDGETS["heat"]


def test_every_budget_names_itself() -> None:
    assert {"blocks", "params", "macs", "cycles"} <= set(BUDGETS)
    for kind, budget in BUDGETS.items():
        assert budget.kind == kind
        assert budget.unit == budget_unit(kind)
        assert budget.label == budget_label(kind)
        assert callable(budget.resolve)
    assert isinstance(smartprune.blocks(0.5), Budget)
    assert budget_unit("sparsity") == budget_unit("blocks") == "blocks"


def test_an_added_budget_is_in_every_list(heat: None) -> None:
    names = budget_names()
    assert (names[0], names[-1]) == ("sparsity", "heat")
    assert set(names) == {"sparsity", *BUDGETS} - {"blocks"}
    assert (budget_unit("heat"), budget_label("heat"), budget_fields("heat")) == ("J", "heat", {"share", "sensor"})


def test_unknown_budgets_keep_their_name() -> None:
    assert (budget_unit("heat"), budget_label("heat"), budget_fields("heat")) == ("heat", "heat", set())


def test_a_request_in_words() -> None:
    assert removal(0.125, "weights") == "remove 12.5% of the weights"
    assert removal(0.5, "NPU cycles", of="model") == "remove 50% of the model's NPU cycles"


def test_the_names_do_not_load_torch() -> None:
    code = "import sys; from smartprune.budgets import budget_names; budget_names(); assert 'torch' not in sys.modules"
    source = str(Path(smartprune.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})
