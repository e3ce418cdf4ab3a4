"""Quantization to int8: scales, biases of empty channels, and operations that stay in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.litert_files import operations, run_litert
from smartprune.artifacts.litert_graph import Value
from smartprune.artifacts.litert_int8 import quantized_weight

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")


def relative_error(model: nn.Module, x: Tensor, path: Path) -> float:
    with torch.no_grad():
        expected = model(x)
    (output,) = run_litert(path, x)
    return float((output - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def test_zeros_stay_zero_and_other_weights_are_within_half_a_step() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=(6, 3, 3, 8)).astype(np.float32) * np.float32(10.0) ** rng.integers(-3, 3, (6, 1, 1, 1))
    array[rng.random(array.shape) < 0.5] = 0
    array[2] = 0
    weight = quantized_weight(Value("w", array.shape, array=array), 0, np.zeros(6), 0.1, 0.1)
    assert weight.quantized is not None
    scales = weight.quantized.scale.reshape(6, 1, 1, 1)
    assert (weight.array[array == 0] == 0).all()
    assert (np.abs(weight.array * scales - array) <= 0.5001 * scales).all()
    assert np.abs(weight.array).max(axis=(1, 2, 3)).tolist() == [127, 127, 0, 127, 127, 127]


def test_the_bias_of_an_empty_channel_fits() -> None:
    array = np.zeros((2, 4), np.float32)
    array[0] = 1e-3
    weight = quantized_weight(Value("w", array.shape, array=array), 0, np.float32([1, 1e6]), 0.01, 0.1)
    assert weight.quantized is not None
    assert (np.abs(np.array([1, 1e6]) / (weight.quantized.scale * 0.01)) < 2**31).all()


def test_a_constant_channel_keeps_its_value(tmp_path: Path) -> None:
    """An empty channel with a bias, next to channels with weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias.copy_(torch.linspace(-1, 2, 8))
    x = torch.randn(2, 3, 8, 8)
    sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x])
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.02


class Emptied(nn.Module):
    """A layer without any weight, joined with small activations."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(7, 3, 1)
        nn.init.zeros_(self.empty.weight)
        nn.init.constant_(self.empty.bias, 0.002)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.empty(x), 0.003 * x], 1))


def test_a_layer_that_lost_every_block_can_be_loaded(tmp_path: Path) -> None:
    """LiteRT refuses layers whose products have steps that are far larger than those of the output."""
    torch.manual_seed(0)
    model, x = Emptied().eval(), torch.randn(2, 3, 8, 8)
    sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x])
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.02


def test_a_layer_whose_outputs_are_almost_never_positive_can_be_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        model[0].bias -= model[0](x).amax((0, 2, 3)) - 1e-5
    sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x])
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.02


class Branches(nn.Module):
    """Joined tensors with different ranges, of which one has a fixed scale, and an operation without an int8 kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.a(x).sigmoid(), 5 * self.b(x), self.c(x).softmax(1)], 1)
        x = nn.functional.max_pool2d(nn.functional.pad(x, (1, 1, 1, 1), value=0.3), 2)
        return self.head(x) - self.head(x).exp()


def test_joined_branches_and_operations_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Branches().eval(), torch.randn(2, 3, 8, 8)
    exported = sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x, torch.randn_like(x)])
    assert exported.float_operations == ("EXP",)
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.05
    assert operations(tmp_path / "m.tflite")["QUANTIZE"] >= 3  # the input, and the two branches with fixed scales
    assert "computed in float: EXP" in str(exported)


@pytest.mark.parametrize("signals", [False, True])
def test_padding_of_a_maximum_leaves_the_scales_as_they_are(signals: bool, tmp_path: Path) -> None:
    """Without a ReLU before it, the padding must lose against negative numbers."""
    torch.manual_seed(0)
    convolution, pool, shape = (nn.Conv1d, nn.MaxPool1d, (2, 3, 12)) if signals else (nn.Conv2d, nn.MaxPool2d, (2, 3, 8, 8))
    model, x = nn.Sequential(convolution(3, 6, 3), pool(3, 2, padding=1), convolution(6, 4, 1)).eval(), torch.randn(shape)
    with torch.no_grad():
        model[0].bias.sub_(2)
    exported = sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x])
    assert exported.float_operations == ()
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.05


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1), nn.LayerNorm(15)
        self.deep = nn.Conv2d(6, 12, 3, groups=6)

    def forward(self, x: Tensor) -> Tensor:
        return self.deep(nn.functional.hardswish(self.norm(self.up(x))))


def test_transposed_and_depthwise_layers_and_a_normalization(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Transposed().eval(), torch.randn(2, 3, 8, 8)
    exported = sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[x])
    assert relative_error(model, x, tmp_path / "m.tflite") < 0.05
    assert exported.float_operations == ("RSQRT",)


def test_int8_files_hold_a_quarter_of_the_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).eval(), torch.randn(1, 256)
    dense = sp.export_litert(model, tmp_path / "f.tflite", x).size
    assert sp.export_litert(model, tmp_path / "m.tflite", x, int8=True, calibration=[torch.randn(20, 256)]).size < 0.3 * dense
