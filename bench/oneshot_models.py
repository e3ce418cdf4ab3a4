"""Networks of bench/oneshot_networks.py that the package does not have: narrower forms, and a small vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smartprune.models.densenet import DenseNet
from smartprune.models.mobilenetv2 import InvertedResidual
from smartprune.models.resnet import ResNet

# The stages of narrow forms of MobileNetV2, as in smartprune.models.mobilenetv2
STAGES_32 = ((1, 8, 1, 1), (6, 16, 2, 1), (6, 24, 3, 2), (6, 48, 3, 2), (6, 80, 2, 1))
STAGES_8 = ((1, 8, 1, 1), (6, 16, 2, 1), (6, 32, 2, 2))


class EncoderBlock(nn.Module):
    """Attention and a multilayer perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """A vision transformer for square images of ``side`` pixels, with the mean of its tokens in front of the classifier."""

    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*[EncoderBlock(width, heads) for _ in range(depth)])
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).mT + self.position
        return self.fc(self.norm(self.blocks(tokens)).mean(1))  # type: ignore[no-any-return]


def resnet18_half(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return ResNet((32, 64, 128, 256), (2, 2, 2, 2), num_classes, in_channels)


def resnet18_quarter(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return ResNet((16, 32, 64, 128), (2, 2, 2, 2), num_classes, in_channels)


def vit(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return VisionTransformer(32, 4, 192, 9, 3, num_classes, in_channels)


def vit_small(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return VisionTransformer(32, 4, 128, 6, 4, num_classes, in_channels)


def vit_narrow(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    return VisionTransformer(32, 8, 96, 4, 4, num_classes, in_channels)


def vit_digits(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    return VisionTransformer(8, 2, 48, 4, 4, num_classes, in_channels)


def densenet_short(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """A DenseNet of growth 24 whose stem has stride 2."""
    model = DenseNet((4, 4, 4), 24, num_classes, in_channels)
    model.conv1 = nn.Conv2d(in_channels, 48, 3, stride=2, padding=1, bias=False)
    return model


def densenet_digits(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    return DenseNet((3, 3), 16, num_classes, in_channels)


def mobilenetv2_narrow(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """A MobileNetV2 with about half of the channels, whose stem has stride 2."""
    return _mobilenetv2(STAGES_32, 2, 320, num_classes, in_channels)


def mobilenetv2_digits(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    return _mobilenetv2(STAGES_8, 1, 128, num_classes, in_channels)


def _mobilenetv2(
    stages: tuple[tuple[int, int, int, int], ...], stride: int, head: int, num_classes: int, in_channels: int
) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(in_channels, 16, 3, stride, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for expansion, width, depth, step in stages:
        for i in range(depth):
            layers.append(InvertedResidual(inputs, width, expansion, step if i == 0 else 1))
            inputs = width
    layers += [nn.Conv2d(inputs, head, 1, bias=False), nn.BatchNorm2d(head), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(head, num_classes))
