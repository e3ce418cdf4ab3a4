"""Second moments of inputs and squared gradients, compared with numpy and with autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smartprune.core.block import Block
from smartprune.core.layers import Layer, find_layers
from smartprune.errors import SmartpruneError
from smartprune.pruning.oneshot import moments
from smartprune.pruning.oneshot.moments import Moment, collect_rows, layer_inputs, pick_rows, sampled_loss, sensitivities, survey


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    return find_layers(model, Block(2, 2), include="*")[0]


@pytest.mark.parametrize("span", [2, moments.SPAN])
def test_moments_are_those_of_numpy(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "SPAN", span)
    torch.manual_seed(0)
    x, w = torch.randn(3, 40, 5) + 2, torch.randn(3, 4, 5)
    moment = Moment.zeros(3, False, 5, torch.device("cpu"), 4)
    for part in range(3):
        for rows in x[part].split(7):
            moment.add(slice(part, part + 1), rows[None], (rows @ w[part].T)[None])
    for part in range(3):
        inputs = x[part].double().numpy()
        outputs = inputs @ w[part].double().numpy().T
        assert np.allclose(moment.mean(False)[part], inputs.T @ inputs / 40, rtol=1e-4)
        assert np.allclose(moment.mean(True)[part], np.cov(inputs.T, bias=True), rtol=1e-4, atol=1e-5)
        both = np.cov(inputs.T, outputs.T, bias=True)[:5, 5:]
        assert np.allclose(moment.mean_cross(True)[part], both, rtol=1e-4, atol=1e-4)
        assert np.allclose(moment.means()[1][part], outputs.mean(0), rtol=1e-4)


def test_parts_that_read_the_same_inputs_share_a_moment() -> None:
    moment, x = Moment.zeros(4, True, 3, torch.device("cpu")), torch.randn(1, 10, 3)
    moment.add(slice(0, 4), x)
    assert torch.allclose(moment.mean(False)[0], (x[0].T @ x[0] / 10).double(), atol=1e-6)


def test_rows_are_picked_once_and_reproducibly() -> None:
    chosen = pick_rows(3, 0.5, 4)(50_000)
    assert chosen is not None
    assert len(chosen) == 8192 == len(chosen.unique())
    assert torch.equal(chosen, pick_rows(3, 0.5, 4)(50_000))  # type: ignore[arg-type]
    assert pick_rows(3, 0.5, 4)(8192) is None


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.conv = nn.Conv2d(2, 6, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.free = nn.Conv2d(6, 6, 1, bias=False)  # its output is read twice
        self.norm2 = nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu_()
        y = self.free(x)
        return self.last((self.norm2(y) + y).mean((2, 3)))  # type: ignore[no-any-return]


def test_survey_finds_order_uses_and_norms() -> None:
    model = Branches()
    layers = layers_of(model)
    result = survey(model, layers, [torch.randn(2, 2, 5, 5)])
    assert [layers[i].name for i in result.order] == ["conv", "free", "last"]
    assert result.uses == {1: 1, 2: 1, 0: 1}
    assert {layers[i].name: norm for i, norm in result.norms.items()} == {"conv": model.norm}
    assert [layer_inputs(layer) for layer in layers] == [6, 18, 6]


def test_a_layer_that_is_never_reached_is_named() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    with pytest.raises(SmartpruneError, match=r"b .1 of 2 layers. computes nothing from the calibration data.*skip='b'"):
        survey(model, layers_of(model), [torch.randn(2, 4)])


def test_nan_activations_name_the_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    with pytest.raises(SmartpruneError, match="the inputs of 1 are NaN"):
        collect_rows(model, layers_of(model), torch.randn(2, 4), 0, 1.0, {1}, lambda use, rows: None)


@pytest.mark.parametrize("frozen", [False, True])
def test_sensitivities_are_squared_gradients_of_the_sampled_loss(frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 3))
    if frozen:
        model.requires_grad_(False)
    batches = [torch.randn(3, 2, 5, 5), torch.randn(2, 2, 5, 5)]
    result = sensitivities(model, layers_of(model), batches, 7, lambda: None)
    assert all(parameter.grad is None for parameter in model.parameters())
    generator = torch.Generator().manual_seed(7)
    expected: list[Any] = [torch.zeros(1, 4), torch.zeros(2, 3), torch.zeros(1, 3)]
    for x in batches:
        first = model[0](x).detach().requires_grad_()
        second = model[2](first.relu())
        logits = model[4](second.flatten(1))
        loss = sampled_loss(logits, generator)
        assert loss is not None
        gradients = torch.autograd.grad(loss, [first, second, logits])
        for i, gradient in enumerate(gradients):
            sums = gradient.square().reshape(len(x), gradient.shape[1], -1).sum((0, 2))
            expected[i] = expected[i] + sums.view_as(expected[i]) / 5
    for a, b in zip(result, expected, strict=True):
        assert torch.allclose(a.float(), b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(("shape", "axis"), [((3, 4, 5, 6), 1), ((7, 3, 5), -1), ((4,), 0), ((0, 3), 1), ((4, 2, 3), -3)])
def test_sums_of_squares_are_those_of_numpy(shape: tuple[int, ...], axis: int, scale: float) -> None:
    values = scale * torch.randn(shape)
    expected = np.moveaxis(np.square(values.double().numpy()), axis, 0).reshape(shape[axis], -1).sum(1)
    assert np.allclose(moments._sums_of_squares(values, axis), expected, rtol=1e-5, atol=0)
    assert not moments._sums_of_squares(torch.zeros(shape), axis).any()


def test_outputs_that_are_not_classes_are_projected() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 2, 1))
    result = sensitivities(model, layers_of(model), [torch.randn(4, 2, 6, 6)], 0, lambda: None)
    assert all((rows > 0).all() for rows in result)


@pytest.mark.parametrize("outputs", [1, 3])
def test_sensitivities_of_batches_of_one_are_like_those_of_others(outputs: int) -> None:
    """One number has no spread, and must not be scaled as if its spread were zero."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, outputs)), torch.randn(64, 4)
    single, whole = (sensitivities(model, layers_of(model), x.split(n), 0, lambda: None)[0].mean() for n in (1, 64))
    assert 0.01 < float(single / whole) < 1000


def test_outputs_without_values_or_spread_have_finite_gradients() -> None:
    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> list[Tensor]:
            y = self.b(self.a(x))
            return [y[0][:0], y[0][:1], 0 * y.sum() + 2, y]

    result = sensitivities(Boxes(), layers_of(Boxes()), [torch.randn(8, 4)], 0, lambda: None)
    assert all(rows.isfinite().all() and (rows > 0).any() for rows in result)


def test_a_layer_without_gradient_gets_the_mean_of_the_others() -> None:
    class Argmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(nn.functional.one_hot(self.a(x).argmax(1), 4).float())  # type: ignore[no-any-return]

    a, b = sensitivities(Argmax(), layers_of(Argmax()), [torch.randn(8, 4)], 0, lambda: None)
    assert torch.allclose(a, b.mean().expand_as(a))
