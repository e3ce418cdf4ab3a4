"""The table of layer types: what can be divided into blocks, and along which axes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.zoo import Conv1D
from smartprune.core.kinds import (
    LAYER_TYPES,
    is_convolution,
    is_layer,
    is_masked,
    stores_inputs_first,
    user_class,
    weight_parts,
)

LAYERS: dict[str, tuple[nn.Module, int, bool, bool]] = {  # the groups, whether a convolution, whether inputs come first
    "conv1d": (nn.Conv1d(4, 6, 3), 1, True, False),
    "conv2d": (nn.Conv2d(4, 6, 3, groups=2), 2, True, False),
    "conv3d": (nn.Conv3d(4, 6, 3), 1, True, False),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, groups=2), 2, True, True),
    "transposed 2d": (nn.ConvTranspose2d(4, 6, 3), 1, True, True),
    "transposed 3d": (nn.ConvTranspose3d(4, 6, 3), 1, True, True),
    "linear": (nn.Linear(4, 6), 1, False, False),
    "Conv1D": (Conv1D(6, 4), 1, False, True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_blocks_in_their_weight(name: str) -> None:
    layer, groups, convolution, inputs_first = LAYERS[name]
    assert is_layer(layer)
    assert (weight_parts(layer, "weight"), weight_parts(layer, "bias")) == (groups, None)
    assert (is_convolution(layer), stores_inputs_first(layer)) == (convolution, inputs_first)
    inputs = layer.weight.shape[0 if inputs_first else 1] * (1 if inputs_first else groups)  # type: ignore[index,union-attr]
    assert inputs == 4


def test_every_type_of_the_table_is_tested() -> None:
    assert {type(layer) for layer, *_ in LAYERS.values()} == {*LAYER_TYPES, Conv1D}


def test_parts_of_attention_and_of_recurrent_cells() -> None:
    attention = nn.MultiheadAttention(8, 2)
    assert weight_parts(attention, "in_proj_weight") == 3
    assert weight_parts(attention, "in_proj_bias") is None
    separate = nn.MultiheadAttention(8, 2, kdim=4, vdim=6)
    assert [weight_parts(separate, f"{name}_proj_weight") for name in "qkv"] == [1, 1, 1]
    for cell, gates in ((nn.LSTMCell(4, 6), 4), (nn.GRUCell(4, 6), 3), (nn.RNNCell(4, 6), 1)):
        assert weight_parts(cell, "weight_ih") == weight_parts(cell, "weight_hh") == gates
        assert weight_parts(cell, "bias_ih") is None


@pytest.mark.parametrize("module", [nn.BatchNorm2d(4), nn.Embedding(4, 4), nn.LSTM(4, 4), nn.ReLU()])
def test_other_modules_have_no_blocks(module: nn.Module) -> None:
    assert not is_layer(module)
    assert all(weight_parts(module, name) is None for name in ("weight", "weight_ih_l0"))


def test_a_name_alone_does_not_make_a_conv1d() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6))

    Other.__name__ = "Conv1D"
    assert not is_layer(Other())


def test_masked_layers_are_recognized_until_they_are_baked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.5, steps=1)
    masked = [is_masked(module) for module in model]
    assert masked == [True, False, True, False]
    assert [is_masked(module) for module in copy.deepcopy(model)] == masked
    assert type(model[0]) is not nn.Linear
    assert user_class(model[0]) is nn.Linear
    assert weight_parts(model[0], "weight") == 1
    pruner.freeze()
    sp.bake(model)
    assert not any(is_masked(module) for module in model)
    assert user_class(model[0]) is type(model[0]) is nn.Linear
