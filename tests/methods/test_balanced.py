"""The ranking between magnitude and share of the layer."""

import math

import pytest
import torch

import smartprune as sp
from helpers import reference, zoo


def test_rank_lies_between_magnitude_and_share() -> None:
    model, _ = zoo.plain_cnn()
    blocks = sp.plan(model, block=(4, 4), sparsity=0.75).blocks(model)
    shares, scores = blocks.share().tolist(), sp.Smart(init="balanced").state(blocks)["scores"].tolist()
    for layer, weight in zip(blocks.layers, blocks.weights, strict=True):
        index = reference.block_index(weight.shape, (4, 4))
        sums = reference.block_sums(weight.detach().square().flatten().tolist(), index)
        for i, (total, count) in enumerate(zip(sums, reference.block_counts(index), strict=True), layer.start):
            assert scores[i] == pytest.approx(0.75 * math.log(total / count) + 0.25 * shares[i], abs=1e-4)
    assert torch.equal(sp.Gradual(norm="balanced").rank(blocks, {}), sp.Smart(init="balanced").measure(blocks))


def test_rank_of_zeros_and_of_large_weights_is_finite() -> None:
    model, _ = zoo.plain_cnn()
    blocks = sp.plan(model, block=(4, 4), sparsity=0.75).blocks(model)
    for scale in (1e15, 1e-30, 0.0):
        with torch.no_grad():
            model[3].weight.mul_(scale)
        rank = sp.Gradual(norm="balanced").rank(blocks, {})
        assert torch.isfinite(rank).all()
    assert float(rank[: blocks.layers[0].n].max()) < float(rank[blocks.layers[0].n :].min())
    with torch.no_grad():
        model[6].weight.zero_()
    assert torch.isfinite(sp.Gradual(norm="balanced").rank(blocks, {})).all()
