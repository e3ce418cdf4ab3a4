"""Residual networks of basic blocks: ResNet18 for 32x32 images, and a small one for 8x8 images."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    """A 3x3 stem, stages of basic blocks (the first with stride 1, others 2), global average pooling and a classifier."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int], num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        inputs = widths[0]
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            strides = [1 if i == 0 else 2] + [1] * (depth - 1)
            blocks = [BasicBlock(inputs if j == 0 else width, width, stride) for j, stride in enumerate(strides)]
            stages.append(nn.Sequential(*blocks))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet18 for 32x32 images: stem 64, stages 64-128-256-512 of two basic blocks each.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    return ResNet((64, 128, 256, 512), (2, 2, 2, 2), num_classes, in_channels)


def resnet8(num_classes: int = 10, in_channels: int = 1, width: int = 16) -> nn.Module:
    """A small residual network: stem ``width``, three stages of one basic block with ``width``, 2x and 4x channels.

    >>> sum(p.numel() for p in resnet8().parameters())
    77754
    """
    return ResNet((width, 2 * width, 4 * width), (1, 1, 1), num_classes, in_channels)
