"""Convolutions, linear layers, normalization and pooling: LiteRT files compute what torch computes, for odd shapes too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.litert_files import check_module, operations

pytest.importorskip("ai_edge_litert", reason="ai-edge-litert is not installed")

IMAGE, LINE = (2, 6, 11, 7), (2, 6, 13)
CASES = {
    "conv": (nn.Conv2d(6, 5, 3), IMAGE),
    "conv same": (nn.Conv2d(6, 5, 3, padding=1), IMAGE),
    "conv stride": (nn.Conv2d(6, 5, 3, stride=2, padding=1), IMAGE),
    "conv stride even": (nn.Conv2d(6, 5, 3, stride=2, padding=1), (1, 6, 8, 12)),
    "conv oblong": (nn.Conv2d(6, 5, (3, 5), stride=(1, 2), padding=(0, 3), bias=False), IMAGE),
    "conv dilated": (nn.Conv2d(6, 5, 3, padding=2, dilation=2), IMAGE),
    "conv padding by name": (nn.Conv2d(6, 5, (5, 3), padding="same"), IMAGE),
    "conv even kernel": (nn.Conv2d(6, 5, 4, padding=1), IMAGE),
    "depthwise": (nn.Conv2d(6, 6, 3, padding=1, groups=6), IMAGE),
    "depthwise stride": (nn.Conv2d(6, 12, 3, stride=2, padding=1, groups=6), IMAGE),
    "grouped": (nn.Conv2d(6, 4, 3, padding=1, groups=2), IMAGE),
    "conv 1-D": (nn.Conv1d(6, 5, 3, padding=1, stride=2), LINE),
    "conv 1-D grouped": (nn.Conv1d(6, 6, 3, groups=6), LINE),
    "transposed": (nn.ConvTranspose2d(6, 5, 2, stride=2), IMAGE),
    "transposed padding": (nn.ConvTranspose2d(6, 5, 3, stride=2, padding=1, output_padding=1), IMAGE),
    "transposed beyond": (nn.ConvTranspose2d(6, 5, 3, stride=2, output_padding=1), IMAGE),
    "linear": (nn.Linear(7, 5), IMAGE),
    "linear without bias": (nn.Linear(6, 5, bias=False), (3, 6)),
    "conv and norm": (nn.Sequential(nn.Conv2d(6, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()), IMAGE),
    "depthwise and norm": (nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6), nn.ReLU6()), IMAGE),
    "linear and norm": (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), (3, 6)),
    "linear on three axes and norm": (nn.Sequential(nn.Linear(13, 5), nn.BatchNorm1d(6)), LINE),
    "conv 1-D and norm": (nn.Sequential(nn.Conv1d(6, 5, 3), nn.BatchNorm1d(5), nn.ReLU()), LINE),
    "norm first": (nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)), IMAGE),
    "max pool": (nn.MaxPool2d(2), IMAGE),
    "max pool of negative numbers": (nn.MaxPool2d(3, stride=2, padding=1), (1, 6, 8, 8)),
    "max pool after relu": (nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)), (1, 6, 8, 8)),
    "max pool same": (nn.MaxPool2d(5, stride=1, padding=2), IMAGE),
    "max pool ceil": (nn.MaxPool2d(3, stride=2, ceil_mode=True), (1, 6, 8, 7)),
    "average pool": (nn.AvgPool2d(3, stride=2), IMAGE),
    "average pool padding": (nn.AvgPool2d(3, stride=1, padding=1), IMAGE),
    "average pool inside": (nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), IMAGE),
    "adaptive pool": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive pool to parts": (nn.AdaptiveAvgPool2d((2, 3)), (2, 6, 8, 9)),
    "adaptive max pool": (nn.AdaptiveMaxPool2d(1), IMAGE),
}


class Together(nn.Module):
    """Several modules for one input, because an export of each takes long. A layer before each decides the order of axes."""

    def __init__(self, modules: Iterable[nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        enter = {2: lambda: nn.Linear(6, 6), 3: lambda: nn.Conv1d(6, 6, 1), 4: lambda: nn.Conv2d(6, 6, 1)}[len(shape)]
        self.parts = nn.ModuleList(nn.Sequential(enter(), module) for module in modules)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


@pytest.mark.parametrize("shape", sorted({shape for _, shape in CASES.values()}))
def test_layers_agree_with_torch(shape: tuple[int, ...], tmp_path: Path) -> None:
    """The helper names the number of the case that differs."""
    torch.manual_seed(0)
    cases = {name: module for name, (module, size) in CASES.items() if size == shape}
    check_module(Together(cases.values(), shape), torch.randn(shape), tmp_path / "m.tflite", names=list(cases))


def test_normalization_and_activation_become_part_of_the_layer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1), nn.BatchNorm2d(4))
    check_module(model, torch.randn(IMAGE), tmp_path / "m.tflite")
    assert operations(tmp_path / "m.tflite") == {"CONV_2D": 2, "TRANSPOSE": 2}


class ReadTwice(nn.Module):
    """The normalization must not change the convolution, which the sum reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.norm(y).relu() + y


def test_a_layer_that_two_operations_read_stays_as_it_is(tmp_path: Path) -> None:
    check_module(ReadTwice(), torch.randn(IMAGE), tmp_path / "m.tflite")


class Shared(nn.Module):
    """One layer, used twice and normalized differently."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.conv(self.first(self.conv(x)).relu()))


def test_a_layer_that_is_used_twice_is_scaled_separately(tmp_path: Path) -> None:
    check_module(Shared(), torch.randn(IMAGE), tmp_path / "m.tflite")


REFUSED = {
    "3-D": (nn.Conv3d(2, 3, 1), (1, 2, 3, 3, 3), r"computes aten.conv3d.default, .* the operations are: .*; replace it"),
    "uneven adaptive pool": (nn.AdaptiveAvgPool2d(4), IMAGE, "must be multiples"),
    "grouped transposed": (nn.ConvTranspose2d(6, 6, 2, groups=2), IMAGE, "with one group"),
    "average ceil": (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (1, 6, 8, 8), "different sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_exported_are_named(name: str, tmp_path: Path) -> None:
    module, shape, message = REFUSED[name]
    with pytest.raises(sp.SmartpruneError, match=message):
        sp.export_litert(module.eval(), tmp_path / "m.tflite", torch.randn(shape))
    assert not (tmp_path / "m.tflite").exists()
