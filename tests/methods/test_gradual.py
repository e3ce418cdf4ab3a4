"""Gradual magnitude: the ramp and returning blocks."""

import math

import torch

from helpers.training_cases import MethodCase


def test_sparsity_follows_a_cubic_ramp_and_blocks_return() -> None:
    job = MethodCase("gradual", "plain_cnn", steps=40)
    pruner, n = job.pruner, job.pruner.plan.n
    for count in range(1, 40):
        job.step()
        kept = int(pruner.mask.sum())
        expected = pruner.plan.keep + (n - pruner.plan.keep) * (1 - count / 40) ** 3
        assert kept == math.ceil(expected - 1e-9)
        now = pruner.mask.bool()
        layer, weight = pruner.plan.layers[0], pruner.blocks.weights[0]
        means = layer.grid.mean(weight.detach().abs())
        assert float(means[now[: layer.n]].min()) >= float(means[~now[: layer.n]].max() if (~now[: layer.n]).any() else 0)
    with torch.no_grad():  # a removed block whose stored weights grow returns
        gone = int((~pruner.mask[: pruner.plan.layers[0].n].bool()).nonzero()[0])
        one = torch.zeros(pruner.plan.layers[0].n)
        one[gone] = 1
        pruner.blocks.weights[0].add_(10 * pruner.plan.layers[0].grid.expand(one))
    job.step()
    assert bool(pruner.mask[gone])
