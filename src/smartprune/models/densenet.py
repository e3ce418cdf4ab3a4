"""DenseNet for 32x32 images. The input of a layer is the output of all earlier layers of its dense block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOTTLENECK = 4  # channels of the 1x1 convolution, as a multiple of the growth


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution. Its ``growth`` new features are prepended to the input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.bn1(x)))
        new = self.conv2(F.relu(self.bn2(new)))
        return torch.cat([new, x], 1)


class Transition(nn.Module):
    """A 1x1 convolution to fewer channels and average pooling, between dense blocks."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """A 3x3 stem with twice the growth, dense blocks with transitions, global average pooling and a classifier."""

    def __init__(self, depths: Sequence[int], growth: int, num_classes: int, in_channels: int, reduction: float = 0.5) -> None:
        super().__init__()
        channels = 2 * growth
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        for i, depth in enumerate(depths):
            layers: list[nn.Module] = []
            if i > 0:
                layers.append(Transition(channels, int(channels * reduction)))
                channels = int(channels * reduction)
            layers += [DenseLayer(channels + j * growth, growth) for j in range(depth)]
            channels += depth * growth
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.stages(self.conv1(x))))
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def densenet(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """DenseNet of growth 12 for 32x32 images: dense blocks of 6, 12, 24 and 16 layers.

    >>> sum(p.numel() for p in densenet().parameters())
    1000618
    """
    return DenseNet((6, 12, 24, 16), 12, num_classes, in_channels)
