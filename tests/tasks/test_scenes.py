"""Scenes of digits are fixed and hold every class."""

from __future__ import annotations

import pytest
import torch

from smartprune.tasks.scenes import SCENES, compose

pytest.importorskip("PIL")


def test_scenes_are_fixed_and_hold_every_class() -> None:
    for split, count in SCENES.items():
        scenes = compose(split, 0)
        assert scenes.shape == (count, 64, 64, 4)
        assert scenes[..., 3].unique().tolist() == list(range(11))
        background = float((scenes[..., 3] == 0).float().mean())
        assert 0.6 < background < 0.9
    compose.cache_clear()
    assert torch.equal(compose("test", 0), scenes)
    assert not torch.equal(compose("test", 1), scenes)
    assert len(scenes.flatten(1).unique(dim=0)) == len(scenes)
