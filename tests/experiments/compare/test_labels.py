"""Labels of methods and tasks in tables."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartprune.experiments.compare.labels import format_setting, method_label, task_label
from smartprune.methods import METHODS, settings


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_with_its_defaults_is_only_its_name(name: str) -> None:
    assert method_label(name, settings(METHODS[name]())) == name


def test_settings_that_are_not_defaults_are_shown() -> None:
    values = settings(dataclasses.replace(METHODS["gradual"](), updates=100))
    assert method_label("gradual", values) == "gradual(updates=100)"
    assert method_label("unknown", {"a": 1, "b": 0.5}) == "unknown(a=1, b=0.5)"


def test_the_folder_of_the_data_is_not_part_of_a_task() -> None:
    assert task_label({"task": "cifar10", "task_settings": {"folder": "/data"}}) == "cifar10"


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_different_numbers_have_different_texts(a: float, b: float) -> None:
    assert (format_setting(a) == format_setting(b)) == (a == b and str(a)[0] == str(b)[0])
    assert float(format_setting(a)) == a
