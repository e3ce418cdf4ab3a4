"""The kernels for ARM: cross-compiled, run in qemu, and compared with torch. No time is measured: there is no such processor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.exported_c import CROSS, FLAGS, ON_ARM, SANITIZE, STRICT, Written, needs_arm, relative_errors
from helpers.operations import Branches, Depthwise, Joined, Kernels, Mixed, Pointwise, Pools, Tiles
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.models import MODELS
from smartprune.runtime.cpu import build
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS

pytestmark = needs_arm
ARM = [row.name for row in INSTRUCTION_SETS if row.architecture == "aarch64"]
FAST = tuple("-O1" if flag == "-O2" else flag for flag in FLAGS)  # compiling takes most of the time
INT8_ERROR = 0.03
HALF_ERROR = 2e-3
HALF = ["neon", "neon_fp16"]  # one converts float16 numbers, and one multiplies them


def run(written: Written, flags: tuple[str, ...] = FAST) -> list[torch.Tensor]:
    return written.run(CROSS, (*flags, *STRICT, "-static"), ON_ARM)


def kernels() -> nn.Module:
    model = Kernels()
    for layer, (*_, block) in zip(model.layers, Kernels.CASES, strict=False):
        if block is not None:
            randomly_pruned(layer, 0.5, block)
    return model.eval()


def test_float32_kernels_of_all_shapes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kernels()
    written = Written(model, model.inputs(), tmp_path, "neon")
    assert_equal_to_rounding(run(written), written.expected)


@pytest.mark.parametrize("target", ARM)
def test_int8_kernels_of_all_shapes(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kernels()
    written = Written(model, model.inputs(), tmp_path, target, int8=True)
    assert max(relative_errors(run(written), written.expected)) < INT8_ERROR


@pytest.mark.parametrize("target", HALF)
def test_float16_kernels_of_all_shapes(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kernels()
    written = Written(model, model.inputs(), tmp_path, target, fp16=True)
    assert max(relative_errors(run(written), written.expected)) < HALF_ERROR


def tiles_in_source(most_pixels: int = 8) -> int:
    """The number of tiles that an instruction set with this many pixels has."""
    text = (build.SOURCES / "conv.c").read_text()
    sizes = [pixels for pixels in (6, 8, 12, 16) if pixels <= most_pixels]
    lists = [text.split(f"#define TILES_{pixels}(F)")[1].split("#define" if pixels < 16 else "#ifndef")[0] for pixels in sizes]
    return sum(len(re.findall(r"F\(\d+, \d+, \d\)", part)) for part in lists)


@pytest.mark.parametrize(("target", "int8"), [("neon", False), ("neon", True), ("neon_dot", True), ("neon_i8mm", True)])
def test_every_tile(target: str, int8: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomly_pruned(Tiles(), 0.3, (4, 4))
    sizes = [(1, 7, width) for width in range(1, 17)] + [(batch, 5, width) for width in range(1, 9) for batch in (1, 3)]
    maps = [torch.randn(batch, 8, height, width) for batch, height, width in sizes]
    written = Written(model, maps, tmp_path, target, int8)
    (used,) = written.network.tiles().values()
    assert len(used) == tiles_in_source()
    outputs = run(written)
    if int8:
        assert max(relative_errors(outputs, written.expected)) < INT8_ERROR
    else:
        assert_equal_to_rounding(outputs, written.expected)


@pytest.mark.parametrize(("target", "most_pixels"), [("neon", 8), ("neon_fp16", 16)])
def test_every_tile_in_float16(target: str, most_pixels: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomly_pruned(Tiles(), 0.3, (4, 4))
    sizes = [(1, 7, width) for width in range(1, 33)] + [(batch, 9, width) for width in range(1, 17) for batch in (1, 3)]
    maps = [torch.randn(batch, 8, height, width) for batch, height, width in sizes]
    written = Written(model, maps, tmp_path, target, fp16=True)
    (used,) = written.network.tiles().values()
    assert len(used) == tiles_in_source(most_pixels)
    assert max(relative_errors(run(written), written.expected)) < HALF_ERROR


@pytest.mark.parametrize("target", HALF)
def test_float16_depthwise_tiles_and_tails(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Depthwise().eval()
    written = Written(model, model.inputs(), tmp_path, target, fp16=True)
    assert max(relative_errors(run(written), written.expected)) < HALF_ERROR


@pytest.mark.parametrize("target", ["neon", "neon_dot"])
def test_int8_depthwise_tiles_and_tails(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Depthwise().eval()
    written = Written(model, model.inputs(), tmp_path, target, int8=True)
    assert max(relative_errors(run(written), written.expected)) < INT8_ERROR


class Everything(nn.Module):
    """All operations except convolutions, and additions and concatenations of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.pools, self.pointwise = Pools(), Pointwise()
        self.branches, self.joined = Branches(20), Joined(16, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [*self.pools(x), *self.pointwise(x), self.branches(x), *self.joined(y)]


@pytest.mark.parametrize(("target", "int8"), [("neon", False), ("neon", True), ("neon_dot", True)])
def test_operations(target: str, int8: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomly_pruned(Everything(), 0.3, (8, 4))
    written = Written(model, (torch.randn(2, 20, 9, 12), torch.randn(2, 6, 11, 9)), tmp_path, target, int8)
    outputs = run(written)
    if int8:
        assert max(relative_errors(outputs, written.expected)) < INT8_ERROR
    else:
        assert_equal_to_rounding(outputs, written.expected)


@pytest.mark.parametrize("target", HALF)
def test_operations_in_float16(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = randomly_pruned(Everything(), 0.3, (8, 4))
    written = Written(model, (torch.randn(2, 20, 9, 12), torch.randn(2, 6, 11, 9)), tmp_path, target, fp16=True)
    assert max(relative_errors(run(written), written.expected)) < HALF_ERROR


def test_int8_sums_do_not_depend_on_the_instruction_set(tmp_path: Path) -> None:
    """Sums are exact, so all sets round the same numbers. They differ in the order of the float operations after the sums."""
    torch.manual_seed(0)
    model, x = randomly_pruned(Mixed(), 0.5, (8, 4)), torch.randn(1, 3, 20, 21)
    portable = Written(model, [x], tmp_path / "portable", "portable", int8=True).run()
    for target in ARM:
        ours = run(Written(model, [x], tmp_path / target, target, int8=True))
        assert max(relative_errors(ours, portable)) < 1e-5


@pytest.mark.parametrize(("target", "int8"), [("neon", False), ("neon_dot", True), ("neon_i8mm", True)])
def test_sanitizers_find_nothing(target: str, int8: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = randomly_pruned(Mixed(), 0.5, (8, 4)), torch.randn(1, 3, 13, 10)
    written = Written(model, [x], tmp_path, target, int8)
    outputs = written.run(CROSS, (*FAST, *SANITIZE), ON_ARM)
    assert max(relative_errors(outputs, written.expected)) < INT8_ERROR


@pytest.mark.parametrize("target", HALF)
def test_sanitizers_find_nothing_in_float16(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = randomly_pruned(Mixed(), 0.5, (8, 4)), torch.randn(1, 3, 13, 10)
    written = Written(model, [x], tmp_path, target, fp16=True)
    outputs = written.run(CROSS, (*FAST, *SANITIZE), ON_ARM)
    assert max(relative_errors(outputs, written.expected)) < HALF_ERROR


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_models_in_float16(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = randomly_pruned(MODELS[name](), 0.9), torch.randn(1, 3, 32, 32)
    written = Written(model, [x], tmp_path, "neon_fp16", fp16=True)
    assert max(relative_errors(run(written), written.expected)) < HALF_ERROR


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_models(name: str, int8: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = randomly_pruned(MODELS[name](), 0.9), torch.randn(1, 3, 32, 32)
    written = Written(model, [x], tmp_path, "neon_dot" if int8 else "neon", int8)
    assert max(relative_errors(run(written), written.expected)) < (INT8_ERROR if int8 else 1e-5)
