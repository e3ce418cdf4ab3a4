"""The C text of a network: several inputs and outputs, tensors with channels last, and sizes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.exported_c import FLAGS, Written, needs_compiler
from helpers.operations import Branches, Joined, Kernels, Pointwise, Pools
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.cpu import build


class Several(nn.Module):
    """Two inputs of which one is read as rows; an output that is returned twice, and one that is an intermediate value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, maps = F.gelu(self.a(x)), F.relu(self.b(y))
        pooled = F.adaptive_avg_pool2d(maps, 1)
        return rows, maps, pooled.view(pooled.size(0), -1)


@needs_compiler
def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    written = Written(randomly_pruned(Several(), 0.3), (torch.randn(2, 3, 12), torch.randn(2, 6, 9, 7)), tmp_path, "portable")
    assert_equal_to_rounding(written.run(), written.expected)
    header = (tmp_path / "net.h").read_text()
    assert "int net_run(const float *input0, const float *input1, float *output0, float *output1, float *output2);" in header
    assert "#define NET_INPUT0_SIZE 72 /* floats, in the order 2 x 3 x 12 */" in header


class Operations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pools, self.pointwise, self.branches, self.joined = Pools(), Pointwise(), Branches(20), Joined(5, 16)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [*self.pools(x), *self.pointwise(x), self.branches(x), *self.joined(y)]


@needs_compiler
def test_all_operations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    best = next(reversed(build.supported_sets()))
    model = randomly_pruned(Operations(), 0.3, (8, 4))
    written = Written(model, (torch.randn(2, 20, 9, 12), torch.randn(1, 6, 11, 9)), tmp_path, best)
    assert_equal_to_rounding(written.run(), written.expected)


@needs_compiler
def test_all_kernels(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Kernels().eval()
    written = Written(model, model.inputs(), tmp_path, next(reversed(build.supported_sets())))
    assert_equal_to_rounding(written.run(flags=FLAGS), written.expected)


def test_sizes_are_those_of_the_arrays(tmp_path: Path) -> None:
    dense = Written(nn.Conv2d(16, 16, 1).eval(), [torch.randn(1, 16, 4, 4)], tmp_path, "portable").network
    pruned = nn.Conv2d(16, 16, 1).eval()
    pruned.weight.data[8:] = 0
    half = Written(pruned, [torch.randn(1, 16, 4, 4)], tmp_path, "portable").network
    assert 16 * 16 * 4 < dense.constants < 16 * 16 * 4 + 300
    assert dense.constants - half.constants >= 16 * 8 * 4
    assert dense.memory == half.memory >= 2 * 16 * 16 * 4
