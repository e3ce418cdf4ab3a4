"""The block vector of a model."""

import math

import torch
from torch import Tensor, nn

from helpers import reference, zoo
from helpers.device_syncs import DeviceSyncs
from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.core.vector import Blocks

BLOCK = Block(4, 4)


def make_blocks(model: nn.Module) -> Blocks:
    return Blocks(model, find_layers(model, BLOCK)[0], None, 5, None)


def test_vector_covers_all_layers_in_order() -> None:
    model, _ = zoo.plain_cnn()
    layers, _ = find_layers(model, BLOCK)
    blocks = Blocks(model, layers, None, 5, None)
    assert blocks.n == blocks.total == 195
    assert blocks.layer.tolist() == [0] * 180 + [1] * 15
    expected: list[float] = []
    for layer in layers:
        weight: Tensor = model.get_parameter(layer.weight)
        assert blocks.weights[len(expected) > 0] is weight
        index = reference.block_index(weight.shape, (4, 4))
        sums = reference.block_sums(weight.detach().abs().flatten().tolist(), index)
        expected += [s / n for s, n in zip(sums, reference.block_counts(index), strict=True)]
    assert torch.allclose(blocks.mean(torch.abs), torch.tensor(expected))
    assert blocks.per_layer(torch.ones(195)).tolist() == [180, 15]


def test_share_ignores_the_scale_of_a_layer_and_ranks_zeros_last() -> None:
    model, _ = zoo.plain_cnn()
    blocks = make_blocks(model)
    before = blocks.share()
    for scale in (1e3, 1e-9, 1e12, 1e-36, 1e30, 1e20):  # some squares exceed float32
        with torch.no_grad():
            model[3].weight.mul_(scale)
        assert torch.allclose(blocks.share(), before, atol=1e-4)
    with torch.no_grad():
        model[3].weight.zero_()
    after = blocks.share()
    assert torch.isfinite(after).all()
    assert float(after[: blocks.layers[0].n].max()) < float(after[blocks.layers[0].n :].min())


def test_share_does_not_synchronize() -> None:
    model = zoo.plain_cnn()[0]
    blocks = make_blocks(model)
    model.to("meta")
    blocks.to(blocks.device)
    with DeviceSyncs() as syncs:
        blocks.share()
    assert syncs.operations == []


def test_share_of_a_layer_with_nan_is_nan() -> None:
    model = zoo.plain_cnn()[0]
    blocks = make_blocks(model)
    with torch.no_grad():
        blocks.weights[0][0, 0] = math.nan
    assert blocks.share().isnan().any()
