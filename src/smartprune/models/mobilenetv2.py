"""MobileNetV2 for 32x32 images: inverted residual blocks with depthwise 3x3 convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STEM, HEAD = 32, 1280
STAGES = (  # expansion, channels, blocks, stride of the first block; the original has one more stride of 2
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise 3x3 and 1x1 projection without ReLU. With stride 1 there is a shortcut."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = expansion * inputs
        self.stride = stride
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride == 1 and inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        inner = F.relu(self.bn2(self.conv2(inner)))
        out: Tensor = self.bn3(self.conv3(inner))
        return out + self.shortcut(x) if self.stride == 1 else out


class MobileNetV2(nn.Module):
    """A 3x3 stem, stages of inverted residuals, a 1x1 convolution, global average pooling and a classifier."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, STEM, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        stages: list[nn.Module] = []
        inputs = STEM
        for expansion, width, depth, stride in STAGES:
            first = InvertedResidual(inputs, width, expansion, stride)
            stages.append(nn.Sequential(first, *(InvertedResidual(width, width, expansion, 1) for _ in range(depth - 1))))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.conv2 = nn.Conv2d(inputs, HEAD, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD)
        self.fc = nn.Linear(HEAD, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.stages(F.relu(self.bn1(self.conv1(x))))
        out = F.relu(self.bn2(self.conv2(out)))
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def mobilenetv2(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """MobileNetV2 for 32x32 images. The stem and the second stage have stride 1.

    >>> sum(p.numel() for p in mobilenetv2().parameters())
    2296922
    """
    return MobileNetV2(num_classes, in_channels)
