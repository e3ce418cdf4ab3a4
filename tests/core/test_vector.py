"""The block vector of a model."""

import torch
from torch import Tensor

from helpers import reference, zoo
from smartprune.core.block import Block
from smartprune.core.layers import find_layers
from smartprune.core.vector import Blocks

BLOCK = Block(4, 4)


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
