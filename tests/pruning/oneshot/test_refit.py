"""The refit, compared with scipy's least squares and with the normal equations."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from scipy.linalg import lstsq

from smartprune.core.block import Block
from smartprune.core.layers import Layer
from smartprune.pruning.oneshot.matrix import Tiles
from smartprune.pruning.oneshot.refit import refit


@pytest.mark.parametrize("most_double", [0, 3, 1536])
def test_kept_weights_are_those_of_least_squares(most_double: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("smartprune.pruning.oneshot.refit"), "MOST_DOUBLE", most_double)
    torch.manual_seed(0)
    parts, outputs, inputs = 2, 5, 7
    grid = Block(2, 3).grid((parts * outputs, inputs), parts)
    tiles = Tiles.of(Layer("a", "Linear", grid, 0, False, (("a", "weight"),)))
    dense, x = torch.randn(parts, outputs, inputs), torch.randn(60, inputs).double()
    y = torch.stack([(x @ dense[p].T.double()) + 0.3 * torch.randn(60, outputs) for p in range(parts)])
    keep = torch.rand(grid.n) < 0.6
    result = refit(dense, (x.T @ x / 60)[None], x.T @ y / 60, keep, tiles, damping=0.05)
    live = grid.expand(keep).view(parts, outputs, inputs)
    assert (result[~live] == 0).all()
    root = np.sqrt(0.05 * float((x.T @ x / 60).diagonal().mean()) * 60)
    for part in range(parts):
        for row in range(outputs):
            columns = live[part, row].nonzero()[:, 0].numpy()
            system = np.vstack([x.numpy()[:, columns], root * np.eye(len(columns))])
            goal = np.concatenate([y[part, :, row].numpy(), root * dense[part, row].double().numpy()[columns]])
            expected = lstsq(system, goal)[0] if len(columns) else []
            assert np.allclose(result[part, row].numpy()[columns], expected, atol=1e-4)


def test_nothing_changes_if_nothing_is_removed() -> None:
    torch.manual_seed(0)
    tiles = Tiles.of(Layer("a", "Linear", Block(2, 2).grid((4, 6)), 0, False, (("a", "weight"),)))
    dense, x = torch.randn(1, 4, 6), torch.randn(30, 6).double()
    moment = (x.T @ x / 30)[None]
    result = refit(dense, moment, moment @ dense.double().mT, torch.ones(6, dtype=torch.bool), tiles)
    assert torch.allclose(result, dense, atol=1e-5)
