"""Promise 10: models that are changed under a pruner, or shared by two pruners, raise immediately."""

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import smartprune as sp
from helpers.training_cases import ALL_LAYERS, Case, three_layers
from smartprune.methods.method import Method


def test_replacing_the_last_module_after_attach_raises() -> None:
    case = Case("plain_cnn")
    pruner = case.attach()
    case.model[10] = nn.Linear(12, 10)
    optimizer = case.optimizer()
    case.loss().backward()
    optimizer.step()
    with pytest.raises(sp.SmartpruneError, match="no longer part of the model"):
        pruner.step()


def test_two_pruners_on_one_layer_raise() -> None:
    model = three_layers()
    sp.attach(model, sp.Smart(), steps=4, **ALL_LAYERS)  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match="belongs to another pruner"):
        sp.attach(model[2], sp.Smart(), steps=4, **ALL_LAYERS)  # type: ignore[arg-type]
    shared, other = three_layers(), three_layers()
    other[2] = shared[2]
    sp.attach(shared, sp.Smart(), steps=4, **ALL_LAYERS)  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match=r"2\b.*belongs to another pruner.*skip="):
        sp.attach(other, sp.Smart(), steps=4, **ALL_LAYERS)  # type: ignore[arg-type]


def test_bake_of_a_model_with_two_pruners_names_the_parts() -> None:
    model = nn.ModuleDict({"a": three_layers(), "b": three_layers()})
    for part in model.values():
        sp.attach(part, sp.Magnitude(), steps=1, **ALL_LAYERS).freeze()  # type: ignore[arg-type]
    with pytest.raises(sp.SmartpruneError, match=r"2 pruners, on a and b; give one part, such as model\.a"):
        sp.bake(model)
    assert sp.bake(model["a"]).met
    assert sp.bake(model["b"]).met


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("method", [sp.Gradual(), sp.Smart()], ids=["gradual", "smart"])
def test_replacing_a_pruned_layer_after_attach_raises(method: Method, place: int) -> None:
    model = three_layers()
    pruner = sp.attach(model, method, steps=3, **ALL_LAYERS)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[place] = nn.Linear(model[place].in_features, model[place].out_features)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    with pytest.raises(sp.SmartpruneError, match=rf"pruner\.step\(\): {place} is no longer part of the model"):
        pruner.step()
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.freeze\(\)"):
        pruner.freeze()


def test_wrapping_a_pruned_layer_after_attach_is_allowed() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            return out

    model = three_layers()
    pruner = sp.attach(model, sp.Gradual(), steps=3, **ALL_LAYERS)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model[2] = Wrapper(model[2])
    for _ in range(3):
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        pruner.step()
    assert pruner.receipt().met


def test_a_module_shared_by_two_models_cannot_hold_scores_of_both() -> None:
    """The second attach would replace the scores of the first search."""
    head = nn.Linear(8, 4)
    first, second = (nn.Sequential(nn.Linear(8, 8), head) for _ in range(2))
    pruner = sp.attach(first, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    scores = pruner.parameters()[0]
    with pytest.raises(
        sp.SmartpruneError, match=r"attach: 1, the module that would hold the scores, already holds those of another pruner"
    ):
        sp.attach(second, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    assert pruner.parameters()[0] is scores
    sp.attach(second, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=2)  # has no scores
    pruner.freeze(force=True)
    sp.bake(first)
    assert [name for name, _ in first.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_apply_to_a_model_that_shares_layers_raises() -> None:
    """Its layers would be masked twice, and the trained scores replaced."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.apply_to\(\): 0 belongs to a pruner already"):
        pruner.apply_to(nn.Sequential(*model))
    pruner.freeze(force=True)
    sp.bake(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("change", [prune.identity, nn.utils.weight_norm])
def test_reparametrizing_a_masked_weight_raises(change: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    x = torch.randn(2, 8)
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    before = model(x)
    with contextlib.suppress(Exception), warnings.catch_warnings():  # torch expects a parameter and finds a property
        warnings.simplefilter("ignore")
        change(model[1], "weight")
    if "weight" in model[1]._parameters:  # torch refused before it changed the layer
        assert torch.equal(model(x), before)
        return
    with pytest.raises(sp.SmartpruneError, match=r"layer 1 has no parameter 'weight' any more: .* before you attach"):
        model(x)
    with pytest.raises(sp.SmartpruneError, match="layer 1 has no parameter"):
        pruner.step()


def test_changing_the_shape_of_a_masked_weight_raises() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    model[1]._parameters["weight"] = nn.Parameter(torch.randn(12, 8))
    with pytest.raises(sp.SmartpruneError, match=r"1\.weight has shape 12x8, but had 8x8 when the pruner was attached"):
        model(torch.randn(2, 8))


def test_apply_to_another_model_raises() -> None:
    pruner = sp.attach(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), sp.Smart(), block=(4, 4), sparsity=0.5, steps=2)
    with pytest.raises(
        sp.SmartpruneError,
        match=r"apply_to\(\): this Linear is not a copy of the model: '0\.weight' or another pruned weight is missing",
    ):
        pruner.apply_to(nn.Linear(8, 8))


@pytest.mark.parametrize("frozen", [False, True])
def test_transforms_of_torch_func_raise(frozen: bool) -> None:
    case = Case("plain_cnn")
    pruner = case.attach()
    if frozen:
        pruner.freeze(force=True)
    weights = {name: parameter.detach() for name, parameter in case.model.named_parameters()}
    with pytest.raises(sp.SmartpruneError, match=r"the model runs in a transform of torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(case.model, w, (case.x,)).sum())(weights)
    with pytest.raises(sp.SmartpruneError, match=r"the model runs in a transform of torch\.func"):
        torch.vmap(case.model)(case.x[None])
    if not frozen:
        pruner.freeze(force=True)
    sp.bake(case.model)
    assert torch.vmap(case.model.eval())(case.x[None]).shape == (1, len(case.x), 10)


@pytest.mark.parametrize("method", ["smart", "magnitude"])
def test_second_derivatives_of_masked_weights_raise(method: str) -> None:
    """Second derivatives with respect to inputs, as in a gradient penalty, are correct."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    pruner = sp.attach(model, method, block=(4, 4), sparsity=0.5, steps=4)
    x = torch.randn(4, 8, requires_grad=True)
    for frozen in (False, True):
        if frozen:
            pruner.freeze(force=True)
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        slope.square().sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        gradients = torch.autograd.grad(model(x).square().sum(), trained, create_graph=True)
        with pytest.raises(sp.SmartpruneError, match="got a second derivative"):
            sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]
