"""int8: layers agree with integer arithmetic, and networks with their float32 results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smartprune as sp
from helpers.pruned_models import randomly_pruned
from smartprune.models import MODELS
from smartprune.runtime import module
from smartprune.runtime.module import Accelerated

FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Two(nn.Module):
    """A convolution with an addition and an activation. Another convolution reads the result, so it is stored as int8."""

    def __init__(self, conv: nn.Conv2d, relu: bool, addition: str) -> None:
        super().__init__()
        self.conv, self.relu, self.addition = conv, relu, addition
        self.side = nn.Conv2d(conv.in_channels, conv.out_channels, 1, conv.stride)
        self.last = nn.Conv2d(conv.out_channels, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        side = self.side(x)
        y = self.conv(x)
        if self.addition == "before":
            y = y + side
        if self.relu:
            y = F.relu(y)
        if self.addition == "after":
            y = y + side
        return y, side, self.last(y) + self.last(side)


class Grid:
    """The 256 numbers that a tensor with this range can hold."""

    def __init__(self, values: Tensor) -> None:
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
        self.scale = float(np.float32((high - low) / 255)) or 1.0
        self.zero = int(np.clip(np.rint(-low / self.scale), 0, 255))

    def whole(self, values: Tensor) -> np.ndarray:
        return np.rint(values.numpy().astype(np.float64) / self.scale + self.zero).astype(np.int64)


def convolved(q: np.ndarray, zero: int, conv: nn.Conv2d) -> tuple[np.ndarray, np.ndarray]:
    """Exact integer sums of an independent convolution in float64, and the scale of every channel."""
    w = conv.weight.detach().numpy()
    largest = np.abs(w.reshape(len(w), -1)).max(1)
    scale = np.where(largest > 0, largest / np.float32(127), 1.0).astype(np.float32)
    whole = np.rint(w / scale[:, None, None, None])
    assert np.abs(whole).max() <= 127
    x = torch.from_numpy((q - zero).astype(np.float64))
    sums = F.conv2d(x, torch.from_numpy(whole.astype(np.float64)), None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return np.rint(sums.numpy()), scale.astype(np.float64)


@FEW
@given(
    st.sampled_from([3, 16, 17, 24, 40]),
    st.sampled_from([1, 16, 20, 33]),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["none", "before", "after"]),
    st.booleans(),
    st.sampled_from([(16, 8), (8, 8), (4, 4), (16, 1)]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 3]),
)
def test_convolutions_agree_with_integer_arithmetic(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    addition: str,
    relu: bool,
    block: tuple[int, int],
    sparsity: float,
    batch: int,
) -> None:
    torch.manual_seed(inputs + outputs)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
    model = Two(conv, relu, addition).eval()
    randomly_pruned(model.conv, sparsity, block)
    x = (torch.randint(0, 256, (batch, inputs, 9, 14)) - 128) / 32  # int8 represents these exactly
    x[0, 0, 0, :2] = torch.tensor([-4.0, 127 / 32])
    with torch.no_grad():
        y, side, _ = model(x)
        fast = sp.accelerate(model, dtype="int8", example=x, threads=1)
        got_y, got_side, _ = fast(x)
    assert_integer_arithmetic(model, x, (y, side), (got_y, got_side))


@FEW
@given(
    st.sampled_from([1, 16, 20, 33]),
    st.sampled_from([(3, 3), (3, 3), (1, 1), (5, 5), (7, 1), (1, 7)]),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 11),
)
def test_depthwise_convolutions_agree_with_integer_arithmetic(
    channels: int, kernel: tuple[int, int], stride: int, dilation: int, relu: bool, height: int, width: int
) -> None:
    torch.manual_seed(channels)
    padding = [dilation * (k // 2) for k in kernel]
    conv = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels)
    model = Two(conv, relu, "none").eval()
    x = (torch.randint(0, 256, (2, channels, height, width)) - 128) / 32
    x[0, 0].view(-1)[:2] = torch.tensor([-4.0, 127 / 32])[: x[0, 0].numel()]
    with torch.no_grad():
        y, side, _ = model(x)
        fast = sp.accelerate(model, dtype="int8", example=x, threads=1)
        got_y, got_side, _ = fast(x)
    assert_integer_arithmetic(model, x, (y, side), (got_y, got_side))


def assert_integer_arithmetic(model: Two, x: Tensor, exact: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> None:
    """The results of the first convolution and of the one beside it are the model's own, rounded once."""
    (y, side), (got_y, got_side), conv = exact, results, model.conv
    grid_x, grid_y, grid_side = Grid(x), Grid(y), Grid(side)
    q = np.clip(grid_x.whole(x), 0, 255)
    sums, scale = convolved(q, grid_x.zero, conv)
    real = sums * (grid_x.scale * scale)[None, :, None, None] + conv.bias.detach().numpy()[None, :, None, None]
    q_side = grid_side.whole(got_side)
    if model.addition == "before":
        real = real + (q_side - grid_side.zero) * grid_side.scale
    if model.relu:
        real = np.maximum(real, 0)
    if model.addition == "after":
        real = real + (q_side - grid_side.zero) * grid_side.scale
    steps = real / grid_y.scale + grid_y.zero
    expected = np.clip(np.rint(steps), 0, 255)
    got = grid_y.whole(got_y)
    close_to_a_tie = np.abs(steps - np.floor(steps) - 0.5) < 1e-3  # the kernel rounds in float32, this test in float64
    assert (got == expected)[~close_to_a_tie].all()
    assert (np.abs(got - expected) <= 1).all()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("activation", [nn.ReLU6, nn.SiLU, nn.Hardswish])
def test_all_operations_are_close_to_float32(stride: int, activation: type[nn.Module]) -> None:
    """Depthwise convolutions, other activations, pooling, concatenation and everything else between convolutions."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act = nn.Conv2d(3, 20, 3, padding=1), activation()
            self.depthwise = nn.Conv2d(20, 20, 3, stride, 1, groups=20)
            self.last = nn.Conv2d(45, 10, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.first(x))
            y = self.act(self.depthwise(y))
            y = torch.cat([y, F.max_pool2d(y, 3, 1, 1), F.avg_pool2d(y, 3, 1, 1)[:, :5] * 1.0], 1)
            y = F.interpolate(y, scale_factor=2) * torch.sigmoid(y.mean((2, 3), keepdim=True))
            return self.last(y)

    model, x = Mixed().eval(), torch.randn(2, 3, 12, 10)
    with torch.no_grad():
        theirs, ours = model(x), sp.accelerate(model, dtype="int8", example=x, threads=1)(x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool2d((4, 2))])
@torch.no_grad()
def test_average_pooling_between_int8_and_float32(pool: nn.Module) -> None:
    """Inputs of convolutions are int8 and everything else is float32. The pool lies between the two, in both directions."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.pool = nn.Conv2d(8, 20, 1), nn.Conv2d(20, 6, 1), pool

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.last(self.pool(self.first(x))), self.pool(x)

    model, x = Between().eval(), torch.randn(2, 8, 8, 8)
    fast = sp.accelerate(model, dtype="int8", example=x, threads=1)
    for ours, theirs in zip(fast(x), model(x), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03


@torch.no_grad()
def test_upsampling_by_a_factor_that_is_not_an_integer() -> None:
    """4 pixels times 3.2 give 12, and torch reads pixel 11 / 3.2 instead of 11 / 3."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Upsample(scale_factor=3.2), nn.Conv2d(8, 8, 1)).eval(), torch.randn(1, 8, 4, 4)
    for dtype, most in (("float32", 1e-6), ("int8", 0.03)):
        fast = sp.accelerate(model, dtype=dtype, example=x, threads=1)
        assert float((fast(x) - model(x)).norm() / model(x).norm()) < most
        assert isinstance(fast, Accelerated)


@pytest.mark.parametrize("lead", [(5,), (2, 7)])
def test_linear_layers(lead: tuple[int, ...]) -> None:
    model, x = randomly_pruned(nn.Sequential(nn.Linear(40, 50), nn.GELU(), nn.Linear(50, 20)), 0.3), torch.randn(*lead, 40)
    with torch.no_grad():
        theirs, ours = model(x), sp.accelerate(model, dtype="int8", example=x, threads=1)(x)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "googlenet", "densenet", "bisenetv2", "yolov5m"])
def test_models(name: str) -> None:
    side = 64 if name in ("bisenetv2", "yolov5m") else 32
    model = randomly_pruned(MODELS[name](), 0.8)
    examples = [torch.randn(2, 3, side, side) for _ in range(3)]
    fast = sp.accelerate(model, (16, 8), dtype="int8", example=examples, threads=1)
    with torch.no_grad():
        ours, theirs = fast(examples[1]), model(examples[1])
    for a, b in zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]:
        assert float((a - b).norm() / (b - b.mean()).norm()) < 0.06


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    model, x = randomly_pruned(MODELS["resnet18"](), 0.9), torch.randn(3, 3, 32, 32)
    for dtype in ("float32", "int8"):
        one, two = (sp.accelerate(model, dtype=dtype, example=x, threads=n) for n in (1, 2))
        assert torch.equal(one(x), two(x))


def test_values_are_clipped_to_the_range_of_the_example() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    x = torch.randn(1, 8, 4, 4)
    fast = sp.accelerate(model, dtype="int8", example=x, threads=1)
    clipped = x.clamp(float(x.min()), float(x.max()))
    big = x * 1000
    with torch.no_grad():
        assert torch.equal(fast(big), fast(big.clamp(float(x.min()) * 1.5, float(x.max()) * 1.5)))
        assert torch.allclose(fast(clipped), model(clipped), atol=0.05)


@pytest.mark.parametrize("outputs", [8, 16])
@torch.no_grad()
def test_results_beyond_32_bits_are_clipped(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two channels of the example cancel, so the result of the first layer is stored with the scale 1."""
    first, second = nn.Conv2d(2, outputs, 1, bias=False), nn.Conv2d(outputs, outputs, 1, bias=False)
    first.weight[:, 0], first.weight[:, 1] = 2.0**40, -(2.0**40)
    second.weight.copy_(torch.eye(outputs)[:, :, None, None])
    monkeypatch.setitem(module.TOLERANCES, "int8", float("inf"))
    example = torch.randint(0, 9, (1, 1, 3, 7)).expand(1, 2, 3, 7) / 8
    fast = sp.accelerate(nn.Sequential(first, second), dtype="int8", example=example, threads=1)
    for channel, result in ((0, 255.0), (1, 0.0)):
        x = torch.zeros(1, 2, 3, 7)
        x[0, channel] = float(example.max())
        torch.testing.assert_close(fast(x), torch.full((1, outputs, 3, 7), result))


def test_int8_needs_a_finite_example() -> None:
    with pytest.raises(sp.SmartpruneError, match="example"):
        sp.accelerate(nn.Conv2d(3, 3, 1), dtype="int8")
    with pytest.raises(sp.SmartpruneError, match="finite"):
        sp.accelerate(nn.Conv2d(3, 3, 1), dtype="int8", example=torch.full((1, 3, 4, 4), torch.inf))


@torch.fx.wrap
def _halved(x: Tensor, sizes: list[int]) -> Tensor:
    sizes[0] = 2  # lists in a traced graph are immutable
    return x / sizes[0]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return _halved(self.layer(x), [1])


def test_a_graph_that_does_not_run_is_an_error() -> None:
    model, x = randomly_pruned(Writes(), 0.5), torch.randn(4, 16)
    assert torch.allclose(sp.accelerate(model, example=x)(x), model(x), atol=1e-5)
    with pytest.raises(sp.SmartpruneError, match=r"does not run \(TypeError.*use float32"):
        sp.accelerate(model, example=x, dtype="int8")
    with pytest.raises(sp.SmartpruneError, match=r"does not run on the example in float32 \(mat1 and mat2 shapes cannot be"):
        sp.accelerate(model, example=x[:, :8], dtype="int8")


def test_a_channel_of_denormal_weights() -> None:
    """Their scale must not become zero, or the channel becomes NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.Conv2d(16, 4, 1))
    model.eval().requires_grad_(False)
    x = torch.randn(4, 3, 8, 8)
    for value in (1e-44, 1e-38, 0.0):
        model[1].weight[3] = value
        expected = model(x)
        assert float((sp.accelerate(model, example=x, dtype="int8")(x) - expected).abs().max() / expected.abs().max()) < 0.03
