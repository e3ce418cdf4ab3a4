"""float32 programs: every operation, every tile and every model agrees with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smartprune as sp
from helpers.operations import Branches, Joined, Pointwise, Pools
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from helpers.zoo import conv1d_net, mobilenet_block, plain_cnn, transformer_block, unet
from smartprune.models import MODELS
from smartprune.runtime.module import Accelerated

SIZES = {"resnet18": 32, "mobilenetv2": 32, "googlenet": 32, "densenet": 32, "bisenetv2": 64, "yolov5m": 64, "resnet50": 64}
FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@torch.no_grad()
def check(model: nn.Module, *inputs: Tensor, threads: int = 1, native: bool = True) -> Accelerated:
    fast = sp.accelerate(model.eval(), threads=threads)
    assert_equal_to_rounding(fast(*inputs), model(*inputs))
    assert isinstance(fast, Accelerated)
    if native:  # torch runs no node
        assert len(fast.plan(*inputs).parts) == 1
    return fast


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    inputs, outputs = (draw(st.sampled_from([1, 3, 8, 16, 17, 20, 40])) for _ in range(2))
    kernel = draw(st.sampled_from([1, 3, 5, 7, (3, 1), (2, 4)]))
    stride, dilation = draw(st.sampled_from([1, 2, 3, (2, 1)])), draw(st.sampled_from([1, 1, 2]))
    padding = draw(st.sampled_from([0, 1, 3, (2, 0)]))
    if stride == 1 and draw(st.booleans()):
        padding = "same"
    size = draw(st.tuples(st.integers(13, 20), st.integers(13, 40)))
    block = draw(st.sampled_from([(16, 8), (8, 8), (16, 16), (8, 4), (4, 4), (1, 8), (16, 1), (1, 1), (16, 8, 3, 3)]))
    sparsity = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    torch.manual_seed(draw(st.integers(0, 99)))
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=draw(st.booleans()))
    after = draw(st.sampled_from([nn.Identity, nn.ReLU, nn.SiLU, nn.ReLU6, nn.Hardswish, nn.GELU]))()
    x = torch.randn(draw(st.sampled_from([1, 1, 2, 9])), inputs, *size)
    if draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    return randomly_pruned(nn.Sequential(conv, nn.BatchNorm2d(outputs), after), sparsity, block), x


@FEW
@given(convolutions(), st.sampled_from([1, 2]))
def test_convolutions(case: tuple[nn.Module, Tensor], threads: int) -> None:
    check(*case, threads=threads)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("outputs", [16, 8])  # vectors of 16 and of 8
def test_every_tile(stride: int, outputs: int) -> None:
    """All widths of a map, and so of a tile; heights and batches that are not multiples of a tile."""
    conv = randomly_pruned(nn.Conv2d(8, outputs, 3, stride, 1), 0.3, (8, 8))
    fast = sp.accelerate(conv, threads=1)
    with torch.no_grad():
        for width in (*range(1, 19), 31, 33, 56, 100):
            for batch, height in ((1, 7), (3, 5)):
                x = torch.randn(batch, 8, height, width)
                assert_equal_to_rounding(fast(x), conv(x))


@FEW
@given(
    st.sampled_from([1, 3, 16, 17, 70, 260]),
    st.sampled_from([1, 10, 33, 128]),
    st.sampled_from([(1,), (2,), (9,), (2, 7), (2, 3, 4)]),
)
def test_linear(inputs: int, outputs: int, lead: tuple[int, ...]) -> None:
    check(randomly_pruned(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()), 0.5), torch.randn(*lead, inputs))


def test_inputs_with_arbitrary_strides() -> None:
    model = randomly_pruned(nn.Sequential(nn.Conv2d(20, 24, 3, padding=1), nn.ReLU()), 0.5)
    big = torch.randn(3, 40, 18, 22)
    for x in (
        big[:, ::2],
        big[:, :20, ::2, 1::2],
        big[:1, 5:25].transpose(2, 3),
        big[:, :20].expand(3, 20, 18, 22),
        big[:, :20].double(),
    ):
        fast = sp.accelerate(model, threads=1)
        assert_equal_to_rounding(fast(x), model(x.float()))


@pytest.mark.parametrize("channels", [16, 20, 3])
@pytest.mark.parametrize("module", [Pools, Pointwise])
def test_operations(module: type[nn.Module], channels: int) -> None:
    fast = check(module(), torch.randn(2, channels, 9, 12))
    assert_equal_to_rounding(
        fast(torch.randn(1, channels, 18, 4)), module()(torch.randn(1, channels, 18, 4)), 1e9
    )  # another shape works


@pytest.mark.parametrize("channels", [16, 20, 5])
def test_additions(channels: int) -> None:
    check(randomly_pruned(Branches(channels), 0.3, (8, 4)), torch.randn(2, channels, 9, 10))


@pytest.mark.parametrize(("first", "second"), [(16, 32), (16, 20), (5, 16), (7, 9)])
def test_concatenations(first: int, second: int) -> None:
    check(randomly_pruned(Joined(first, second), 0.3, (8, 4)), torch.randn(2, 6, 11, 9))


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "dilation"), [(3, 1), (3, 2), (5, 1), (1, 1)])
def test_depthwise(stride: int, kernel: int, dilation: int) -> None:
    for channels in (16, 20):
        conv = nn.Conv2d(channels, channels, kernel, stride, kernel // 2 * dilation, dilation, groups=channels)
        for activation in (nn.ReLU6(), nn.SiLU()):
            check(nn.Sequential(conv, nn.BatchNorm2d(channels), activation), torch.randn(2, channels, 11, 13))


def test_grouped_convolutions() -> None:
    check(nn.Conv2d(24, 36, 3, padding=1, groups=4), torch.randn(2, 24, 7, 9))
    check(nn.Conv2d(16, 96, 3, padding=1, groups=16), torch.randn(2, 16, 7, 9))


@pytest.mark.parametrize("name", sorted(SIZES))
def test_models(name: str) -> None:
    model, x = randomly_pruned(MODELS[name](), 0.9), torch.randn(2, 3, SIZES[name], SIZES[name])
    fast = check(model, x, native=name != "yolov5m")
    assert len(fast.plan(x).programs) == 1


@pytest.mark.parametrize("make", [plain_cnn, mobilenet_block, transformer_block, unet, conv1d_net])
def test_torch_runs_nodes_without_kernels(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, x = make()
    check(randomly_pruned(model, 0.5), x, native=False)


def test_a_value_that_is_read_in_two_layouts() -> None:
    """The channels of a linear layer are the last axis, those of a convolution the second."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear, self.last = nn.Conv2d(8, 8, 1), nn.Linear(12, 12), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = F.gelu(self.linear(x))
            return self.conv(x) + y, self.last(y), self.last(self.conv(y))

    check(Mixed(), torch.randn(2, 8, 7, 12), native=False)


def test_values_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            z = self.relu(y)
            z = self.conv(z) + y  # y is rectified by now
            z += y
            return z

    check(InPlace(), torch.randn(1, 8, 6, 6))


def test_a_model_that_cannot_be_traced_runs_its_own_code() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 16, 3, padding=1), nn.Linear(16, 4)
            self.again = self.a

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x) if float(x.sum()) > 0 else self.again(-x)
            return self.b(y.mean((2, 3)))

    model = randomly_pruned(Dynamic(), 0.4)
    fast = sp.accelerate(model, threads=1)
    for x in (torch.rand(2, 8, 5, 5), -torch.rand(2, 8, 5, 5)):
        assert_equal_to_rounding(fast(x), model(x))
    assert isinstance(fast.a, Accelerated)
    assert fast.a is fast.again


def test_several_inputs_and_nested_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(4, 8, 3)

        def forward(self, x: Tensor, y: Tensor, factor: float = 2.0) -> dict[str, object]:
            return {"sum": self.a(x) + self.a(y), "both": (self.a(y), factor), "x": x}

    model, x, y = Two(), torch.randn(1, 4, 6, 6), torch.randn(1, 4, 6, 6)
    fast = sp.accelerate(model, threads=1)
    ours, theirs = fast(x, y=y), model(x, y)
    assert_equal_to_rounding(ours["sum"], theirs["sum"])
    assert_equal_to_rounding(ours["both"][0], theirs["both"][0])
    assert ours["both"][1] == 2.0
    assert ours["x"] is x


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 64), (9, 65), (128, 128), (1024, 512), (100_000, 1), (1, 100_000)])
def test_mean_of_a_large_map_does_not_drift(size: tuple[int, int]) -> None:
    """A single float sum of equal numbers loses precision, which random numbers do not show."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).mean((2, 3))

    torch.manual_seed(0)
    model = Mean().eval().requires_grad_(False)
    x = torch.full((1, 3, *size), 0.1)
    fast = sp.accelerate(model, example=torch.randn(1, 3, *size))
    expected = (model.conv.weight.double().flatten(1) * float(x[0, 0, 0, 0])).sum(1)
    assert float((fast(x)[0].double() - expected).abs().max() / expected.abs().max()) < 5e-6
