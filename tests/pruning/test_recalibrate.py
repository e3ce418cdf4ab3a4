"""Batch-norm statistics from data, compared with numpy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smartprune as sp


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))


def images(*sizes: int) -> list[Tensor]:
    return [torch.randn(n, 3, 8, 8) * (i + 1) for i, n in enumerate(sizes)]


def test_statistics_are_those_of_all_samples() -> None:
    """Batches of different sizes and means: the average over batches would be wrong."""
    model, data = network(), images(5, 2, 9)
    sp.recalibrate(model, [(x, torch.zeros(len(x))) for x in data])
    out = model[0](torch.cat(data)).detach().numpy().transpose(1, 0, 2, 3).reshape(8, -1)
    assert np.allclose(model[1].running_mean, out.mean(1), atol=1e-5)
    assert np.allclose(model[1].running_var, out.var(1, ddof=1), rtol=1e-4)


@pytest.mark.parametrize("sizes", [(16, 1), (1, 1, 1, 1)], ids=["last", "all"])
def test_batches_of_one_sample_count_although_they_have_no_variance(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    data = [torch.randn(n, 3) for n in sizes]
    sp.recalibrate(model, data)
    out = model[0](torch.cat(data)).detach().numpy()
    assert np.allclose(model[1].running_mean, out.mean(0), atol=1e-5)
    assert np.allclose(model[1].running_var, out.var(0, ddof=1), rtol=1e-4)
    assert model[4].running_var.isfinite().all()


def test_later_norms_see_inputs_that_earlier_norms_normalized() -> None:
    model, [x] = network(), images(16)
    sp.recalibrate(model, [x])
    y = model[3](torch.relu(model[1].train()(model[0](x)))).detach()
    assert torch.allclose(model[4].running_mean, y.mean((0, 2, 3)), atol=1e-5)


def test_only_statistics_change() -> None:
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    sp.recalibrate(model, images(4, 4))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.running_mean", "1.running_var", "4.running_mean", "4.running_var"}
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_samples_limits_what_is_read() -> None:
    a, b, data = network(), network(), images(8, 8, 8)
    sp.recalibrate(a, data, samples=9)
    sp.recalibrate(b, data[:2])
    assert torch.equal(a[4].running_var, b[4].running_var)


def test_failures_leave_the_model_as_it_was() -> None:
    model = network()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = torch.inf
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(sp.SmartpruneError, match="recalibrate: the inputs of 4 are NaN"):
        sp.recalibrate(model, images(4))
    with pytest.raises(sp.SmartpruneError, match="batches: the model does not run"):
        sp.recalibrate(model, [torch.randn(4, 5, 8, 8)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.track_running_stats for module in model if isinstance(module, nn.BatchNorm2d))


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(sp.SmartpruneError, match="has no batch norm"):
        sp.recalibrate(nn.Sequential(nn.Linear(4, 4)), [torch.randn(4, 4)])
    with pytest.raises(sp.SmartpruneError, match=r"give a torch\.nn\.Module"):
        sp.recalibrate("resnet18", [torch.randn(4, 4)])  # type: ignore[arg-type]
