"""ResNet50 for 224x224 images. Its bottlenecks have their stride in the 3x3 convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STEM = 64
EXPANSION = 4  # output channels of a bottleneck per inner channel


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


def stage(inputs: int, inner: int, depth: int, stride: int) -> nn.Sequential:
    """``depth`` bottlenecks. The first one has the stride."""
    first = Bottleneck(inputs, inner, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * inner, inner, 1) for _ in range(depth - 1)))


class ResNet50(nn.Module):
    """A 7x7 stem, max pooling, four stages of bottlenecks, global average pooling and a classifier.

    Module names are the same as in torchvision, so its checkpoints can be loaded.
    """

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, STEM, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.layer1 = stage(STEM, 64, 3, 1)
        self.layer2 = stage(256, 128, 4, 2)
        self.layer3 = stage(512, 256, 6, 2)
        self.layer4 = stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, padding=1)
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """ResNet50 for 224x224 images: stages of 3, 4, 6 and 3 bottlenecks with 256, 512, 1024 and 2048 channels.

    >>> sum(p.numel() for p in resnet50().parameters())
    25557032
    """
    return ResNet50(num_classes, in_channels)
