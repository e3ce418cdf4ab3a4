"""The time left of a benchmark."""

from __future__ import annotations

import pytest

from smartprune.experiments.bench import eta as module
from smartprune.experiments.bench.eta import Eta


def test_steps_are_expected_to_take_as_long_as_the_last_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    messages: list[str] = []
    eta = Eta(messages.append, {"prepare": 2, "round": 4}, {"round": 3.0})
    for kind, seconds in (("prepare", 10.0), ("round", 5.0), ("round", 4.0), ("prepare", 8.0), ("round", 4.0)):
        with eta.step(kind, kind):
            clock[0] += seconds
    assert messages == [
        "prepare",
        "round, about 0:22 left",  # 10 + 4 * 3
        "round, about 0:25 left",  # 10 + 3 * 5
        "prepare, about 0:18 left",  # 10 + 2 * 4
        "round, about 0:08 left",  # 2 * 4
    ]
