"""float16: numbers are rounded as numpy rounds them, layers agree with float64 arithmetic, and nothing becomes infinite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import smartprune as sp
from helpers.exported_c import CROSS, FLAGS, ON_ARM, Written, needs_arm, needs_compiler, relative_errors
from helpers.operations import Branches, Joined, Kernels, Pointwise, Pools
from helpers.pruned_models import randomly_pruned
from smartprune.models import MODELS
from smartprune.runtime.cpu import build
from smartprune.runtime.cpu.instruction_sets import HALF_SUM

pytestmark = needs_compiler
FEW = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGEST = 65504.0
ERROR = 2e-3  # of results, root mean square
BEST = next(reversed(build.supported_sets()))


def scale_of(values: Tensor) -> float:
    """The power of two that makes the largest number one from 4 to 8."""
    return float(2.0 ** (np.frexp(float(values.abs().max()))[1] - 3))


def rounded(values: Tensor, scale: float) -> Tensor:
    """The numbers that float16 activations of this scale hold, as numpy rounds them."""
    stored = np.clip(values.double().numpy() / scale, -LARGEST, LARGEST).astype(np.float16)
    return torch.from_numpy(stored.astype(np.float64) * scale).float()


def every_half() -> Tensor:
    """All finite float16 numbers, the numbers halfway between neighbours, numbers next to these, and larger ones: 1x16xHxW."""
    bits = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (bits[:-1] + bits[1:]) / 2
    near = [np.nextafter(middle, np.float32(bound)) for bound in (0, np.inf)]
    beyond = np.array([65519, 65520, 65536, 1e5, 1e30, 3e38], np.float32)
    numbers = np.concatenate([bits, middle, *near, beyond])
    numbers = np.concatenate([numbers, -numbers])
    return torch.from_numpy(np.pad(numbers, (0, -len(numbers) % (16 * 64)))).view(1, 16, -1, 64)


class Shifted(nn.Module):
    """A copy, and a convolution that adds a number to every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(16, 16, 1)
        self.layer.weight.data = torch.eye(16)[:, :, None, None]
        self.layer.bias.data = torch.linspace(-1, 1, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clamp(max=3.2e38), self.layer(x)


@pytest.mark.parametrize("isa", ["portable", BEST])
def test_numbers_are_rounded_as_numpy_rounds_them(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_ISA", isa)
    x = every_half()
    model = Shifted().eval()
    fast = sp.accelerate(model, example=torch.full_like(x, 4.0), dtype="float16", threads=1)
    assert f" {isa}," in repr(fast)
    copied, shifted = fast(x)
    assert torch.equal(copied, rounded(x, 1.0))
    assert torch.equal(shifted, rounded(rounded(x, 1.0) + model.layer.bias[:, None, None].detach(), 1.0))
    assert fast(torch.full_like(x, torch.nan))[0].isnan().all()


@needs_arm
@pytest.mark.parametrize(("target", "product_error"), [("neon", 0.0), ("neon_fp16", 2.0**-17)])
def test_arm_rounds_numbers_as_numpy_rounds_them(target: str, product_error: float, tmp_path: Path) -> None:
    """Products in float16 are rounded, too, which matters for the smallest numbers."""
    x = every_half()
    model = Shifted().eval()
    written = Written(model, [torch.full_like(x, 4.0)], tmp_path, target, fp16=True)
    written.inputs = [x]
    copied, shifted = written.run(CROSS, (*FLAGS, "-static"), ON_ARM)
    assert torch.equal(copied, rounded(x, 1.0))
    exact = rounded(x, 1.0) + model.layer.bias[:, None, None].detach()
    wrong = shifted != rounded(exact, 1.0)
    assert not wrong.any() or product_error
    assert ((shifted - exact).abs() <= exact.abs() * 2.0**-11 + product_error + 2.0**-25)[exact.abs() < LARGEST].all()


class Two(nn.Module):
    """A convolution, with the result of another one added before or after its activation."""

    def __init__(self, conv: nn.Conv2d, activation: nn.Module, addition: str) -> None:
        super().__init__()
        self.conv, self.activation, self.addition = conv, activation, addition
        self.side = nn.Conv2d(conv.in_channels, conv.out_channels, 1, conv.stride)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side, y = self.side(x), self.conv(x)
        if self.addition == "before":
            y = y + side
        y = self.activation(y)
        return (y + side if self.addition == "after" else y), side


def rounded_weight(weight: Tensor) -> Tensor:
    """The weight as float16 stores it: the largest number of a channel is so small that HALF_SUM products fit."""
    largest = weight.detach().flatten(1).abs().amax(1).double().numpy()
    scale = 2.0 ** (np.frexp(largest)[1] + np.log2(HALF_SUM) + 1).reshape(-1, 1, 1, 1)
    return torch.from_numpy((weight.detach().double().numpy() / scale).astype(np.float16).astype(np.float64) * scale)


@FEW
@given(
    st.sampled_from([1, 3, 16, 17, 24, 40]),
    st.sampled_from([1, 16, 20, 33]),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["none", "before", "after"]),
    st.sampled_from([nn.Identity, nn.ReLU, nn.SiLU]),
    st.sampled_from([(16, 8), (8, 4), (4, 4), (16, 1)]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 3]),
    st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_convolutions_agree_with_float64(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int,
    addition: str,
    activation: type[nn.Module],
    block: tuple[int, int],
    sparsity: float,
    batch: int,
    size: float,
) -> None:
    torch.manual_seed(inputs + outputs)
    model = Two(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2), activation(), addition).eval()
    model.conv.bias.data *= size
    model.side.bias.data *= size
    randomly_pruned(model.conv, sparsity, block)
    x = size * torch.randn(batch, inputs, 9, 14)
    with torch.no_grad():
        y, side = sp.accelerate(model, example=x, dtype="float16", threads=1)(x)
        stored = rounded(x, scale_of(x)).double()
        model.double()
        for layer in (model.conv, model.side):
            layer.weight.data = rounded_weight(layer.weight)
        expected, expected_side = model(stored)
        sides = expected_side - side  # its rounding is an error of the sum
    assert_within_half_a_step(side, expected_side)
    assert_within_half_a_step(y, expected, 0.0 if addition == "none" else 1.1 * float(sides.abs().max()))


def assert_within_half_a_step(actual: Tensor, expected: Tensor, more: float = 0.0) -> None:
    """Numbers are those of float64, rounded to 11 bits once. float32 sums have an error, too."""
    allowed = expected.abs() * 2.0**-11 + 2e-6 * expected.abs().max() + more
    assert ((actual - expected).abs() <= allowed).all()


@torch.no_grad()
def check(model: nn.Module, *inputs: Tensor, threads: int = 1) -> None:
    fast = sp.accelerate(model.eval(), example=inputs, dtype="float16", threads=threads)
    expected = torch.utils._pytree.tree_leaves(model(*inputs))
    assert max(relative_errors(torch.utils._pytree.tree_leaves(fast(*inputs)), expected)) < ERROR


@pytest.mark.parametrize("model", [Pools(), Pointwise(), Branches(20)])
def test_operations(model: nn.Module) -> None:
    torch.manual_seed(0)
    check(model, torch.randn(2, 20, 9, 12))


@pytest.mark.parametrize("parts", [(16, 20), (5, 16)])
def test_concatenations(parts: tuple[int, int]) -> None:
    torch.manual_seed(0)
    check(Joined(*parts), torch.randn(2, 6, 11, 9), threads=2)


def test_all_kernels() -> None:
    torch.manual_seed(0)
    model = Kernels()
    check(model, *model.inputs(), threads=2)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2", "googlenet", "yolov5m"])
def test_models(name: str) -> None:
    torch.manual_seed(0)
    side = 64 if name == "yolov5m" else 32
    check(randomly_pruned(MODELS[name](), 0.8), torch.randn(2, 3, side, side))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    model, x = randomly_pruned(MODELS["resnet18"](), 0.9), torch.randn(3, 3, 32, 32)
    one, two = (sp.accelerate(model, dtype="float16", example=x, threads=n) for n in (1, 2))
    assert torch.equal(one(x), two(x))


def large_sums() -> tuple[nn.Module, Tensor, Tensor]:
    """A sum of 4,096 products with equal weights, an example, and an input that is as large as float16 stores."""
    layer = nn.Conv2d(4096, 8, 1, bias=False).eval()
    layer.weight.data.fill_(0.999)
    example = torch.full((1, 4096, 3, 3), 0.99)
    return layer.requires_grad_(False), example, torch.full_like(example, LARGEST * scale_of(example))


def test_large_sums_are_finite(tmp_path: Path) -> None:
    """Numbers that are much larger than the example are cut off, and do not become infinite or NaN."""
    layer, example, x = large_sums()
    largest = LARGEST * scale_of(layer(example))
    fast = sp.accelerate(layer, example=example, dtype="float16", threads=1)
    assert torch.equal(fast(1e20 * x), fast(x))
    assert torch.allclose(fast(x), layer(x).clamp(max=largest), rtol=1e-3)
    written = Written(layer, [example], tmp_path, "portable", fp16=True)
    written.inputs = [x]
    assert torch.allclose(written.run()[0], layer(x).clamp(max=largest), rtol=1e-3)


@needs_arm
def test_float16_sums_on_arm_are_finite(tmp_path: Path) -> None:
    """The products of HALF_SUM channels are added in float16: the largest of them still have finite sums."""
    layer, example, x = large_sums()
    largest = LARGEST * scale_of(layer(example))
    written = Written(layer, [example], tmp_path, "neon_fp16", fp16=True)
    written.inputs = [x]
    assert torch.allclose(written.run(CROSS, (*FLAGS, "-static"), ON_ARM)[0], layer(x).clamp(max=largest), rtol=4e-3)


def test_activations_and_weights_take_half_the_memory(tmp_path: Path) -> None:
    model, x = randomly_pruned(MODELS["resnet8"](in_channels=3), 0.5), torch.randn(1, 3, 32, 32)
    full = Written(model, [x], tmp_path, "neon").network
    half = Written(model, [x], tmp_path, "neon_fp16", fp16=True).network
    assert half.memory < 0.51 * full.memory
    assert half.constants < 0.6 * full.constants  # some of it are tables


def test_float16_needs_a_finite_example() -> None:
    layer = nn.Conv2d(3, 3, 1)
    with pytest.raises(sp.SmartpruneError, match="float16 needs example= to measure the range"):
        sp.accelerate(layer, dtype="float16")
    with pytest.raises(sp.SmartpruneError, match="not finite for the example, and float16 needs finite ones"):
        sp.accelerate(layer, dtype="float16", example=torch.full((1, 3, 4, 4), torch.inf))
    with pytest.raises(sp.SmartpruneError, match='backend="reference" supports only float32'):
        sp.accelerate(layer, dtype="float16", example=torch.zeros(1, 3, 4, 4), backend="reference")
    with pytest.raises(sp.SmartpruneError, match="dtype='half' is not one of float32, float16, int8"):
        sp.accelerate(layer, dtype="half")


@torch.fx.wrap
def _sorted(x: Tensor, sizes: list[int]) -> Tensor:
    sizes[0] = 2  # lists in a traced graph are immutable
    return x.sort()[0]


class Sorts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return _sorted(self.layer(x), [1])


def test_a_graph_that_does_not_run_is_an_error() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"float16 needs it; use float32"):
        sp.accelerate(randomly_pruned(Sorts(), 0.5), example=torch.randn(4, 16), dtype="float16")


def test_zeros_as_example_and_weights() -> None:
    """There is no largest number to scale by."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(16, 4, 1, bias=False)).eval()
    model[2].weight.data[1] = 0
    x = torch.randn(1, 8, 6, 6)
    fast = sp.accelerate(model, example=torch.zeros_like(x), dtype="float16", threads=1)
    with torch.no_grad():
        assert relative_errors([fast(x)], [model(x)])[0] < ERROR
        assert torch.equal(fast(x)[:, 1], torch.zeros(1, 6, 6))
        assert F.relu(fast(x)).any()
