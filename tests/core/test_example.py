"""A model runs once on an example, and is left as it was."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from smartprune.core.example import outputs_depend_on, run_example
from smartprune.errors import SmartpruneError


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor | float = 1.0) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return a.add_(b)


def test_tensors_tuples_and_dictionaries_are_arguments() -> None:
    for example in (torch.ones(2), (torch.ones(2),), [torch.ones(2), 1.0], {"b": torch.ones(2), "a": torch.ones(2)}):
        assert run_example(Sum(), example, nullcontext()).tolist() == [2.0, 2.0]


def test_modes_of_all_modules_are_restored() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout())).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    run_example(model, torch.ones(1), nullcontext())
    assert [module.training for module in model.modules()] == before


def test_an_inference_tensor_may_be_changed_by_the_model() -> None:
    with torch.inference_mode():
        example = torch.ones(2)
    run_example(Sum(), example, nullcontext())
    assert example.tolist() == [1.0, 1.0]


def test_errors_of_the_model_say_what_to_give() -> None:
    model = nn.Linear(3, 2).train()
    with pytest.raises(SmartpruneError, match=r"example: the model does not run on it \(mat1 .*\); give one input") as caught:
        run_example(model, torch.ones(1, 4), nullcontext())
    assert "\n" not in str(caught.value)
    assert model.training
    with pytest.raises(SmartpruneError, match="example is a int; give a tensor, or a tuple or dict of arguments"):
        run_example(model, 3, nullcontext())


class Constant(nn.Module):
    def forward(self, x: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        return {"out": torch.ones(len(x))}


class Lookup(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return ids * 2


def test_outputs_depend_on_every_kind_of_input() -> None:
    assert outputs_depend_on(nn.Linear(3, 2), torch.zeros(1, 3))
    assert not outputs_depend_on(Constant(), torch.zeros(1, 3))
    assert not outputs_depend_on(Constant(), {"x": torch.zeros(1, 3), "ids": torch.arange(3)})
    assert outputs_depend_on(Lookup(), (torch.arange(5),))
    assert outputs_depend_on(Lookup(), torch.zeros(3, dtype=torch.int64)), "equal integers cannot be changed, so nothing is known"
