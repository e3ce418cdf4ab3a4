"""Finding the pruner of a model, also through wrappers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import smartprune as sp


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def attach(network: nn.Module) -> sp.Pruner:
    return sp.attach(network, "magnitude", block=(4, 4), sparsity=0.5, steps=1)


def test_the_pruner_is_found_in_every_wrapper() -> None:
    network = model()
    assert sp.find_pruner(network) is None
    pruner = attach(network)
    for wrapper in (network, nn.Sequential(network), torch.compile(network, backend="eager")):
        assert sp.find_pruner(wrapper) is pruner
    assert sp.find_pruner(nn.Sequential(model())) is None


def test_a_copy_has_a_pruner_of_its_own() -> None:
    network = model()
    pruner = attach(network)
    of_copy = sp.find_pruner(copy.deepcopy(network))
    assert of_copy is not None
    assert of_copy is not pruner


def test_a_baked_model_has_none() -> None:
    network = model()
    attach(network).freeze()
    sp.bake(network)
    assert sp.find_pruner(network) is None


def test_two_pruners_raise_and_are_named() -> None:
    pair = nn.ModuleDict({"student": model(), "teacher": model()})
    attach(pair["student"])
    attach(pair["teacher"])
    with pytest.raises(sp.SmartpruneError, match=r"2 pruners, on student and teacher; give one part, such as model\.student"):
        sp.find_pruner(pair)


def test_anything_but_a_module_raises() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"find_pruner: model is a dict; give a torch\.nn\.Module"):
        sp.find_pruner({})  # type: ignore[arg-type]
