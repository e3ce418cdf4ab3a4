"""bake names layers and outputs that died."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import smartprune as sp


def pruned(dead: bool, residual: bool = False) -> nn.Module:
    """A network of which magnitude pruning removes the whole second layer, or a part of every layer."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = Residual(layers) if residual else layers
    if dead:
        with torch.no_grad():
            layers[2].weight.mul_(1e-4)
    pruner = sp.attach(model, "magnitude", block=(4, 4), sparsity=0.7, steps=1)
    pruner.freeze()
    return model


class Residual(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        out: torch.Tensor = self.layers[4](h + self.layers[2](h))
        return out


def test_layers_without_blocks_are_named() -> None:
    model = pruned(dead=True)
    with pytest.warns(UserWarning, match=r"bake: 1 of 2 layers kept no block, so nothing passes through them: 2; .*floor=0\.01"):
        receipt = sp.bake(model)
    assert receipt.met
    assert sp.find_pruner(model) is None


def test_a_living_network_gives_no_warning() -> None:
    model = pruned(dead=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.bake(model, example=torch.randn(2, 8))


def test_outputs_that_do_not_depend_on_the_input_are_reported() -> None:
    model = pruned(dead=True)
    with pytest.warns(UserWarning, match="the outputs of the pruned model do not depend on its input"):
        sp.bake(model, example=torch.ones(2, 8))
    assert torch.equal(model(torch.randn(1, 8)), model(torch.randn(1, 8)))


def test_a_residual_path_around_a_dead_layer_keeps_the_outputs_alive() -> None:
    with pytest.warns(UserWarning, match="bake:") as caught:
        sp.bake(pruned(dead=True, residual=True), example=torch.ones(2, 8))
    assert [str(warning.message).split(",")[0] for warning in caught] == ["bake: 1 of 2 layers kept no block"]


def test_an_example_that_does_not_run_leaves_the_model_masked() -> None:
    model = pruned(dead=False)
    with pytest.raises(sp.SmartpruneError, match="example: the model does not run on it"):
        sp.bake(model, example=torch.ones(2, 9))
    assert sp.find_pruner(model) is not None
    sp.bake(model)
