"""Networks that consist of the operations of the CPU runtime."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Branches(nn.Module):
    """Additions before and after an activation: of a value that is used twice, of itself, and of one value per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, channels, 1)
        self.c = nn.Conv2d(channels, channels, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x) + self.b(x))
        y = y + F.relu(self.b(y))
        y = self.c(y) + y
        z = F.silu(self.a(y)) + x
        z = z + self.c(z).mean((2, 3), keepdim=True)
        w = self.b(z)
        w = w + w
        return self.norm(w) * torch.sigmoid(self.a(w)) + 2.0 * z + 1.0


class Joined(nn.Module):
    """Concatenations at the borders of blocks and elsewhere, of values that are used elsewhere too."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, first, 3, padding=1), nn.Conv2d(6, second, 1)
        self.c = nn.Conv2d(first + second + 6, 12, 3, padding=1)
        self.d = nn.Conv2d(12 + first + first, 5, 5, padding=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = F.relu(self.a(x)), self.b(x)
        c = self.c(torch.cat([a, b, x], 1))
        return self.d(torch.cat([c, a, a], dim=1)), F.max_pool2d(a, 3, 1, 1)


class Pools(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            F.max_pool2d(x, 3, 2, padding=1),
            F.max_pool2d(x, 2, ceil_mode=True),
            F.max_pool2d(x, (3, 2), (1, 2), dilation=(2, 1)),
            F.avg_pool2d(x, 3, 2, padding=1),
            F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False),
            F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True),
            F.avg_pool2d(x, 2, divisor_override=3),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_avg_pool2d(x, (3, 4)),
            x.mean((2, 3)),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, scale_factor=(3, 1)),
            F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
            F.interpolate(x, size=(7, 31), mode="bilinear", align_corners=True),
            F.interpolate(x, size=(20, 5), mode="bilinear"),
            F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        ]


class Pointwise(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        large = x * 40.0
        return [
            F.relu(x),
            F.relu6(large),
            F.hardtanh(large, -3.0, 2.0),
            x.clamp(min=-0.5),
            torch.clamp(x, max=0.25),
            F.silu(large),
            torch.sigmoid(large),
            F.hardswish(large),
            F.hardsigmoid(large),
            F.leaky_relu(x, 0.2),
            F.gelu(x),
            x + large,
            x * large,
            x + 1,
            F.dropout(x, 0.5, training=False) * x,
        ]


class Mixed(nn.Module):
    """A small network with most kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.depthwise, self.down = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 40, 3, 2, 1)
        self.point, self.head = nn.Conv2d(40, 40, 1), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.depthwise(F.relu(self.norm(self.stem(x)))))
        y = F.relu(self.down(y))
        y = F.max_pool2d(y + F.relu(self.point(y)), 3, 2, 1)
        return self.head(y.mean((2, 3)))


class Tiles(nn.Module):
    """One convolution per stride on maps of all widths: together they use all tiles."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, 12, 3, stride, 1) for stride in (1, 2, 3))

    def forward(self, *maps: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers for x in maps]


class Depthwise(nn.Module):
    """Depthwise convolutions of several kernels and strides on maps of all small sizes: together they use all tiles and tails."""

    SETTINGS = (  # kernel, stride, dilation
        ((3, 3), 1, 1),
        ((3, 3), 2, 1),
        ((5, 5), 1, 1),
        ((1, 7), 2, 2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for kernel, stride, dilation in self.SETTINGS:
            padding = [dilation * (k // 2) for k in kernel]
            layer = nn.Conv2d(20, 20, kernel, stride, padding, dilation, groups=20)
            self.layers.append(nn.Sequential(layer, nn.ReLU(), nn.Conv2d(20, 4, 1)))  # the last one reads int8

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, 20, height, width) for height in range(1, 8) for width in range(1, 8))

    def forward(self, *maps: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers for x in maps]


class Kernels(nn.Module):
    """Convolutions of all kinds and linear layers, each with its own input and with zero blocks of another shape."""

    CASES = (  # input channels, output channels, settings, activation, block
        (1, 20, {"kernel_size": 3, "padding": 1}, nn.ReLU, (4, 1)),
        (2, 12, {"kernel_size": 3}, nn.Identity, (1, 2)),
        (3, 24, {"kernel_size": 7, "stride": 2, "padding": 3}, nn.ReLU6, (8, 3)),
        (4, 8, {"kernel_size": (2, 5), "stride": (1, 2), "padding": (1, 2)}, nn.SiLU, (4, 4)),
        (17, 40, {"kernel_size": 3, "padding": 1}, nn.Hardswish, (16, 8)),
        (20, 9, {"kernel_size": 3, "padding": 2, "dilation": 2}, nn.GELU, (8, 8)),
        (20, 30, {"kernel_size": 1, "stride": 3}, nn.Hardsigmoid, (1, 1)),
        (40, 33, {"kernel_size": 1}, nn.Sigmoid, (16, 1)),
        (24, 36, {"kernel_size": 3, "padding": 1, "groups": 4}, nn.ReLU, None),
        (20, 20, {"kernel_size": 3, "padding": 1, "groups": 20}, nn.ReLU6, None),
        (16, 16, {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 16}, nn.SiLU, None),
        (20, 20, {"kernel_size": 5, "padding": 4, "dilation": 2, "groups": 20}, nn.Identity, None),
    )

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for inputs, outputs, settings, activation, _ in self.CASES:
            self.layers.append(nn.Sequential(nn.Conv2d(inputs, outputs, **settings), activation()))
        self.layers.append(nn.Sequential(nn.Linear(33, 20), nn.LeakyReLU(0.2)))

    def inputs(self) -> tuple[Tensor, ...]:
        maps = [torch.randn(2, inputs, 11, 14) for inputs, *_ in self.CASES]
        return (*maps, torch.randn(2, 5, 33))

    def forward(self, *maps: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, maps, strict=True)]
