"""Corrections after the refit: the distance to the dense network, new statistics, and tuned scales and offsets."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smartprune.pruning.oneshot.correct import distance, error, outputs_of, recalibrated, tuned


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)).eval()


DATA = [torch.randn(16, 2, 5, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_distance_of_classes_is_the_divergence_of_torch() -> None:
    out, target = torch.randn(7, 5), torch.randn(7, 5)
    expected = F.kl_div(out.log_softmax(1), target.softmax(1), reduction="batchmean")
    assert float(distance([out], [target])) == pytest.approx(float(expected), rel=1e-5)


def test_distance_of_other_outputs_is_relative() -> None:
    target = torch.randn(2, 3, 8, 8)
    assert float(distance([target + 1], [target])) == pytest.approx(float(1 / target.var(correction=0)))
    assert float(distance([10 * target + 1, target], [10 * target, target])) == pytest.approx(
        float(0.01 / target.var(correction=0)), rel=1e-4
    )


def test_outputs_of_other_shapes_are_infinitely_far() -> None:
    target = [torch.randn(4, 3), torch.zeros(0, 4)]
    assert float(distance(target, target)) == 0
    for outputs in ([target[0]], [target[0][:3], target[1]], [*target, target[0]], []):
        assert float(distance(outputs, target)) == float("inf")


def test_outputs_that_are_not_finite_are_infinitely_far() -> None:
    model = network()
    targets = [outputs_of(model, x) for x in DATA]
    assert error(model, DATA, targets) == 0
    with torch.no_grad():
        model[4].bias[0] = torch.nan
    assert error(model, DATA, targets) == float("inf")


def test_recalibration_is_done_on_a_copy() -> None:
    model = network()
    other = recalibrated(model, DATA)
    assert not model[1].running_mean.any()
    assert torch.allclose(other[1].running_mean, model[0](torch.cat(DATA)).mean((0, 2, 3)), atol=1e-5)


def test_tuning_changes_only_parameters_of_one_axis_and_comes_closer() -> None:
    dense = network()
    model = copy.deepcopy(dense)
    with torch.no_grad():
        model[0].weight[:3] = 0
    before, targets = copy.deepcopy(model.state_dict()), [outputs_of(dense, x) for x in DATA]
    done: list[int] = []
    other = tuned(model, DATA, targets, 30, 0.01, done.append)
    assert done == list(range(1, 31))
    assert error(other, DATA, targets) < 0.9 * error(model, DATA, targets)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    changed = {name for name, value in other.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.bias", "1.weight", "1.bias", "4.bias"}


def test_tuning_in_parts_uses_every_sample_in_turn() -> None:
    model, seen = network(), []
    targets = [[y[0] + 1] for y in (outputs_of(model, x) for x in DATA)]
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tuned(model, DATA, targets, 9, 0.01, at_once=7)
    assert [len(x) for x in seen] == [5, 5, 5, 5, 5, 5, 6, 6, 6]
    for number, x in enumerate(DATA):
        assert torch.equal(torch.cat(seen[number::3]), x)


def test_batches_that_cannot_be_divided_are_tuned_whole() -> None:
    class Pooled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return super().forward(x).mean(0, keepdim=True)  # type: ignore[no-any-return]

    sizes: list[int] = []
    model = Pooled(*network())
    targets = [[y[0] + 1] for y in (outputs_of(model, x) for x in DATA)]
    sizes.clear()
    tuned(model, DATA, targets, 3, 0.01, at_once=7)
    assert sizes == [16, 16, 16]


def test_a_model_without_scales_is_returned_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    x = torch.randn(8, 4)
    assert torch.equal(tuned(model, [x], [outputs_of(model, x)], 3, 0.1)[0].weight, model[0].weight)
