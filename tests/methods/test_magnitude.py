"""Magnitude: one choice, at any scale of the weights."""

from typing import Any

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.slow_blocks import best, slow_norms
from helpers.training_cases import MethodCase


def test_mask_is_chosen_once() -> None:
    job = MethodCase("magnitude", "plain_cnn")
    first = job.pruner.mask
    job.run(5)
    assert torch.equal(first, job.pruner.mask)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-100, 2.0**100])
@pytest.mark.parametrize(
    "method", [sp.Magnitude("l2"), sp.Gradual(norm="l2", updates=1), sp.Acdc(1), sp.Pdp(allocation="global_once")]
)
def test_norms_of_any_scale_rank_blocks(method: Any, scale: float) -> None:
    """Squares of these weights are beyond float32, the norms are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.Linear(30, 20, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(scale)
    pruner = sp.attach(model, method, block=(4, 3), sparsity=0.6, include="*", steps=2)
    norms = slow_norms(pruner)
    pruner.freeze()
    assert set(pruner.mask.nonzero().flatten().tolist()) == best(norms, pruner.plan.keep)
