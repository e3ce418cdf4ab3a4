"""Calibration data: what a batch may be, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smartprune.errors import SmartpruneError
from smartprune.pruning.oneshot.batches import first_sample, read_batches, size_of


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return x + y * scale


def read(model: nn.Module, batches: Any, samples: int = 100) -> list[Any]:
    return read_batches("prune", model, batches, samples)


def test_labels_are_left_out() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4)
    [batch] = read(nn.Linear(3, 3), [(x, y)])
    assert len(batch) == 1
    assert torch.equal(batch[0], x)


def test_a_model_of_two_arguments_gets_both() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    [batch] = read(Two(), [[x, y, torch.zeros(4)]])
    assert [torch.equal(a, b) for a, b in zip(batch, (x, y), strict=True)] == [True, True]


def test_dictionaries_and_nested_arguments_are_kept() -> None:
    x = torch.randn(4, 3)
    assert list(read(Two(), [{"x": x, "y": x}])[0]) == ["x", "y"]
    assert torch.equal(read(nn.Linear(3, 3), [({"input": x}, torch.zeros(4))])[0]["input"], x)


class Options(nn.Module):
    def forward(self, options: dict[str, Tensor]) -> Tensor:
        return options["x"]


class Several(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return torch.stack(tensors)


def test_a_dictionary_or_list_can_be_the_only_argument() -> None:
    x = torch.randn(4, 3)
    for batch in ({"x": x}, ({"x": x}, torch.zeros(4))):
        [arguments] = read(Options(), [batch])
        assert torch.equal(Options()(*arguments), x)
    [arguments] = read(Options(), [([x, x], torch.zeros(4))])
    assert [type(argument) for argument in arguments] == [list]
    [arguments] = read(Several(), [([x, x], torch.zeros(4))])
    assert Several()(*arguments).shape == (2, 4, 3)


def test_batches_without_samples_are_left_out() -> None:
    assert [size_of(batch) for batch in read(nn.Linear(3, 3), [torch.randn(n, 3) for n in (0, 4, 0, 2)])] == [4, 2]


def test_no_more_batches_are_read_than_needed() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.randn(8, 3)

    assert [size_of(batch) for batch in read(nn.Linear(3, 3), endless(), samples=20)] == [8, 8, 8]


def test_batches_may_have_different_sizes() -> None:
    assert [size_of(batch) for batch in read(nn.Linear(3, 3), [torch.randn(n, 3) for n in (5, 1, 3)])] == [5, 1, 3]


def test_the_first_sample_has_one_entry_of_each_tensor() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(first_sample(x), x[:1])
    assert first_sample((x, [x, 2]))[1][0].shape == (1, 3)
    assert first_sample({"x": x, "mask": torch.zeros(3, 3)})["x"].shape == (4, 3)  # not one entry per sample


BAD: dict[str, tuple[Any, str]] = {
    "none": ([], "no calibration data"),
    "an empty batch": ([torch.randn(0, 3)], "no calibration data"),
    "one sample": ([torch.randn(1, 3)], "one sample is not enough"),
    "equal samples": ([torch.ones(4, 3), torch.ones(2, 3)], "all 6 samples are equal"),
    "NaN": ([torch.randn(4, 3), torch.full((2, 3), torch.nan)], "NaN or infinity"),
    "one tensor": (torch.randn(4, 3), r"batches is a Tensor.*write \[batch\]"),
    "no iterable": (3, "batches is a int"),
    "meta": ([torch.randn(4, 3, device="meta")], "a batch is on the meta device and has no values"),
    "texts": (["a"], "a batch is a str"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_data_is_refused(name: str) -> None:
    batches, message = BAD[name]
    with pytest.raises(SmartpruneError, match=message):
        read(nn.Linear(3, 3), batches)
