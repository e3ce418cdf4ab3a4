"""Accelerated models never read memory that is not their input's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import smartprune as sp
from helpers.odd_tensors import FREED, WITHOUT_MEMORY, WithoutClass, freed
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned

X = (2, 4, 8, 8)


def make(seen: bool, rows: bool = False) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, its accelerated form, and an input; ``seen`` calls it with an ordinary input first."""
    layers = [nn.Linear(8, 8), nn.ReLU()] if rows else [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)]
    model = randomly_pruned(nn.Sequential(*layers), 0.4, (4, 4))
    fast, x = sp.accelerate(model, threads=1), torch.randn(X)
    if seen:
        fast(x)
    return model, fast, x


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_MEMORY if kind != "fake"])
def test_torch_computes_with_tensors_without_memory(kind: str, seen: bool, rows: bool) -> None:
    model, fast, x = make(seen, rows)
    odd = WITHOUT_MEMORY[kind](x)
    with torch.no_grad():
        result, expected = fast(odd), model(odd)
    if kind == "functional":
        result, expected = torch._from_functional_tensor(result), torch._from_functional_tensor(expected)
    assert_equal_to_rounding(result, expected)
    assert_equal_to_rounding(fast(x), model(x))


@pytest.mark.parametrize("seen", [False, True])
def test_fake_tensors_give_the_error_of_torch(seen: bool) -> None:
    _, fast, x = make(seen)
    with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        fast(WITHOUT_MEMORY["fake"](x))
    with FakeTensorMode(), pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        fast(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch.func.jvp
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    "transform", [torch.vmap, torch.func.functionalize, lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[0]]
)
def test_function_transforms_agree_with_the_model(transform: Callable[..., Callable[[Tensor], Tensor]], seen: bool) -> None:
    model, fast, x = make(seen)
    x = x[None]
    with torch.no_grad():
        assert_equal_to_rounding(transform(lambda x: fast(x.reshape(X)))(x), transform(lambda x: model(x.reshape(X)))(x))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", FREED)
def test_freed_inputs_are_an_error(kind: str, seen: bool, rows: bool) -> None:
    model, fast, x = make(seen, rows)
    with pytest.raises(sp.SmartpruneError, match=r"accelerated model: a tensor of shape \(2, 4, 8, 8\) has only .* memory left"):
        fast(FREED[kind](x))
    assert_equal_to_rounding(fast(x), model(x))


@pytest.mark.parametrize("seen", [False, True])
def test_subclasses_in_memory_are_accelerated(seen: bool) -> None:
    model, fast, x = make(seen)
    assert_equal_to_rounding(fast(x.as_subclass(WithoutClass)), model(x))


def test_int8_names_the_kind_of_an_odd_input() -> None:
    model, _, x = make(False)
    fast = sp.accelerate(model, dtype="int8", example=x, threads=1)
    with pytest.raises(sp.SmartpruneError, match="Tensor without memory of its own, which int8 does not support"):
        fast(torch._efficientzerotensor((1, 4, 8, 8)))


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_freed_weights_are_an_error(kind: str) -> None:
    model, _, _ = make(False)
    if kind == "weight":
        model[0].weight.untyped_storage().resize_(0)  # type: ignore[index]
    else:
        model.register_buffer("scale", freed(torch.ones(3)))
    with pytest.raises(sp.SmartpruneError, match=r"accelerate: a tensor of shape .* has only 0 bytes of memory left"):
        sp.accelerate(model)
