"""GoogLeNet for 32x32 images: nine inception modules with four parallel branches each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# channels of the branches: 1x1 | 1x1, 3x3 | 1x1, two 3x3 | pooling, 1x1. None is a max pooling that halves the resolution.
INCEPTIONS: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
STEM = 192


def conv_bn_relu(inputs: int, outputs: int, size: int) -> list[nn.Module]:
    """Convolution with a bias, batch norm and ReLU. The resolution does not change."""
    return [conv_before_norm(inputs, outputs, size), nn.BatchNorm2d(outputs), nn.ReLU()]


def conv_before_norm(inputs: int, outputs: int, size: int) -> nn.Conv2d:
    """A convolution whose bias does not train. The batch norm after it subtracts any bias, so the gradient would be zero."""
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2)
    assert conv.bias is not None
    conv.bias.requires_grad_(False)
    return conv


class Inception(nn.Module):
    """Four parallel branches. Two 3x3 convolutions replace the 5x5 convolution."""

    def __init__(self, inputs: int, one: int, to_three: int, three: int, to_five: int, five: int, pool: int) -> None:
        super().__init__()
        self.one = nn.Sequential(*conv_bn_relu(inputs, one, 1))
        self.three = nn.Sequential(*conv_bn_relu(inputs, to_three, 1), *conv_bn_relu(to_three, three, 3))
        self.five = nn.Sequential(*conv_bn_relu(inputs, to_five, 1), *conv_bn_relu(to_five, five, 3), *conv_bn_relu(five, five, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *conv_bn_relu(inputs, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    """A 3x3 stem, nine inception modules with two poolings, global average pooling and a classifier."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = conv_before_norm(in_channels, STEM, 3)
        self.bn1 = nn.BatchNorm2d(STEM)
        stages: list[nn.Module] = []
        inputs = STEM
        for widths in INCEPTIONS:
            if widths is None:
                stages.append(nn.MaxPool2d(3, 2, padding=1))
            else:
                stages.append(Inception(inputs, *widths))
                inputs = widths[0] + widths[2] + widths[4] + widths[5]
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(out.mean((2, 3)))  # type: ignore[no-any-return]


def googlenet(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """GoogLeNet for 32x32 images: stem 192, inception modules with 256 to 1024 channels. Convolutions have biases.

    >>> sum(p.numel() for p in googlenet().parameters())
    6166250
    """
    return GoogLeNet(num_classes, in_channels)
