"""What a search records for its report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import smartprune as sp
from smartprune.reports.runlog import read_scores, sampled_blocks
from smartprune.training.history import mask_sample, save_scores


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))


@pytest.mark.parametrize("method", ["smart", "gradual"])
def test_the_sample_is_the_mask_of_the_same_blocks_in_every_row(method: str) -> None:
    pruner = sp.attach(model(), method, block=(4, 4), sparsity=0.75, steps=5)
    mask = pruner.mask
    sample = mask_sample(pruner)
    assert len(sample) == 64
    assert sample == [round(float(mask[block]), 4) for block in sampled_blocks(len(mask))]
    pruner.freeze(force=True)
    assert set(mask_sample(pruner)) <= {0.0, 1.0}


def test_saved_scores_rank_the_kept_blocks_first(tmp_path: Path) -> None:
    pruner = sp.attach(model(), "smart", block=(4, 4), sparsity=0.75, steps=5)
    save_scores(pruner, tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing was ranked yet
    pruner.freeze(force=True)
    save_scores(pruner, tmp_path)
    mask = pruner.mask
    scores = read_scores(tmp_path, len(mask))
    assert scores is not None
    assert scores[mask.numpy()].min() >= scores[~mask.numpy()].max()
