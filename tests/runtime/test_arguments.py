"""The arguments of a call of an accelerated model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding
from smartprune.runtime.arguments import check_arguments, in_order, names_of, signature_of


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.linear(x) * scale + shift


class Boxed(Scaled):
    def forward(self, box: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return self.linear(box["x"])


def test_keyword_arguments_are_put_in_order() -> None:
    names = names_of(Scaled())
    assert names == ["x", "scale"]
    assert in_order(names, (1,), {"scale": 2, "shift": 3}) == ((1, 2), {"shift": 3})
    assert in_order(names, (), {"scale": 2}) == ((), {"scale": 2})  # x is missing
    assert [p.name for p in signature_of(Scaled())] == ["x", "scale", "shift"]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("as_list", [True, False])
def test_an_example_can_be_a_dictionary_of_keyword_arguments(dtype: str, as_list: bool) -> None:
    model, example = Scaled(), {"scale": torch.ones(2, 8), "x": torch.randn(2, 8)}
    fast = sp.accelerate(model, threads=1, dtype=dtype, example=[example] if as_list else example)
    expected = model(**example).detach()
    if dtype == "float32":
        assert_equal_to_rounding(fast(**example), expected)
        assert_equal_to_rounding(fast(example["x"], example["scale"]), expected)
    else:
        assert float((fast(**example) - expected).abs().max()) < 0.1 * float(expected.abs().max())


def test_a_dictionary_is_one_input_of_a_model_that_takes_one() -> None:
    model, box = Boxed(), {"x": torch.randn(2, 8)}
    assert_equal_to_rounding(sp.accelerate(model, threads=1, example=box)(box), model(box))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("example", [torch.ones(2, 5), torch.ones(2, 8).long(), "text", {"y": torch.ones(2, 8)}, []], ids=str)
def test_a_wrong_example_is_an_error(example: Any, dtype: str) -> None:
    if example == [] and dtype == "float32":
        pytest.skip("an empty list is not an example, which float32 allows")
    with pytest.raises(sp.SmartpruneError, match=r"^accelerate: "):
        sp.accelerate(nn.Sequential(nn.Linear(8, 8)), threads=1, dtype=dtype, example=example)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "the input 'x' is missing"),
        ((1,), {}, "the input 'scale' is missing"),
        ((1, 2, 3), {}, "takes 3 inputs, and got 3"),
    ],
)
def test_wrong_arguments_are_an_error(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(sp.SmartpruneError, match=message):
        check_arguments(Scaled(), args, kwargs)
