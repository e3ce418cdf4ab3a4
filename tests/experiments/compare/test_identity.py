"""Which runs count as the same."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from helpers.training_jobs import small_config
from smartprune.experiments.compare.identity import protocol


def test_protocol_leaves_out_where_a_run_was_trained(tmp_path: Path) -> None:
    config = asdict(small_config(tmp_path))
    elsewhere = {**config, "out": "x", "dense": "y", "device": "cuda", "seed": 3, "checkpoint_seconds": 1}
    assert protocol(config) == protocol(elsewhere)
    for name, value in (("lr", 0.3), ("floor", 0.1), ("skip", ["a*"]), ("amp", "bf16"), ("schedule_over", "pruning")):
        assert protocol({**config, name: value}) != protocol(config), name
