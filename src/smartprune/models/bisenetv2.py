"""BiSeNetV2: a wide, shallow detail branch and a narrow, deep semantic branch, joined by guided aggregation."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DETAIL = (64, 64, 128)
SEMANTIC = (16, 32, 64, 128)
EXPANSION = 6  # inner channels of a gather-expansion layer per input channel
HEAD, AUXILIARY = 1024, 128  # inner channels of the heads
DROPOUT = 0.1


def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Convolution and batch norm."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)


def conv_relu(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU."""
    return nn.Sequential(*conv(inputs, outputs, size, stride, groups), nn.ReLU())


def upsample(x: Tensor, factor: int, mode: str = "bilinear") -> Tensor:
    return F.interpolate(x, scale_factor=factor, mode=mode, align_corners=False if mode == "bilinear" else None)


class Detail(nn.Sequential):
    """Eight 3x3 convolutions, down to 1/8 of the resolution."""

    def __init__(self, in_channels: int) -> None:
        layers: list[nn.Module] = []
        inputs = in_channels
        for width, depth in zip(DETAIL, (2, 3, 3), strict=True):
            layers += [conv_relu(inputs, width, 3, 2), *(conv_relu(width, width, 3) for _ in range(depth - 1))]
            inputs = width
        super().__init__(*layers)


class Stem(nn.Module):
    """A convolution with stride 2, then convolutions and max pooling in parallel, down to 1/4 of the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = conv_relu(inputs, outputs, 3, 2)
        self.left = nn.Sequential(conv_relu(outputs, outputs // 2, 1), conv_relu(outputs // 2, outputs, 3, 2))
        self.fuse = conv_relu(2 * outputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.fuse(torch.cat([self.left(x), F.max_pool2d(x, 3, 2, padding=1)], 1))  # type: ignore[no-any-return]


class GatherExpand(nn.Module):
    """3x3, depthwise 3x3 expansion and 1x1 projection with a shortcut. With a stride, both paths have one more depthwise layer."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = EXPANSION * inputs
        self.gather = conv_relu(inputs, inputs, 3)
        self.shortcut = nn.Sequential()
        if stride == 1:
            self.depthwise = conv_relu(inputs, inner, 3, groups=inputs)
        else:
            wider = conv(inputs, inner, 3, stride, groups=inputs)
            self.depthwise = nn.Sequential(*wider, *conv(inner, inner, 3, groups=inner), nn.ReLU())
            self.shortcut = nn.Sequential(*conv(inputs, inputs, 3, stride, groups=inputs), *conv(inputs, outputs, 1))
        project, norm = conv(inner, outputs, 1)
        nn.init.zeros_(norm.weight)  # the layer starts as its shortcut
        self.project = nn.Sequential(project, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.project(self.depthwise(self.gather(x))) + self.shortcut(x))


class Context(nn.Module):
    """Adds the global average to every position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.mean = conv_relu(channels, channels, 1)
        self.last = conv_relu(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.mean(self.bn(x.mean((2, 3), keepdim=True))))  # type: ignore[no-any-return]


class Semantic(nn.Module):
    """The stem, gather-expansion layers down to 1/32 of the resolution, and the context embedding."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        c2, c3, c4, c5 = SEMANTIC
        self.stem = Stem(in_channels, c2)
        self.stage3 = nn.Sequential(GatherExpand(c2, c3, 2), GatherExpand(c3, c3, 1))
        self.stage4 = nn.Sequential(GatherExpand(c3, c4, 2), GatherExpand(c4, c4, 1))
        self.stage5 = nn.Sequential(GatherExpand(c4, c5, 2), *(GatherExpand(c5, c5, 1) for _ in range(3)))
        self.context = Context(c5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the stem, of the three stages, and of the context embedding."""
        features = [self.stem(x)]
        for layer in (self.stage3, self.stage4, self.stage5, self.context):
            features.append(layer(features[-1]))
        return tuple(features)


class Aggregation(nn.Module):
    """Each branch is gated by the other, at 1/8 and 1/32 of the resolution. A 3x3 convolution follows the sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()

        def plain() -> nn.Sequential:  # the 1x1 convolution has no batch norm
            return nn.Sequential(*conv(channels, channels, 3, groups=channels), nn.Conv2d(channels, channels, 1, bias=False))

        self.detail = plain()
        self.detail_down = nn.Sequential(*conv(channels, channels, 3, 2), nn.AvgPool2d(3, 2, padding=1))
        self.semantic_up = nn.Sequential(*conv(channels, channels, 3))
        self.semantic = plain()
        self.last = conv_relu(channels, channels, 3)

    def forward(self, detail: Tensor, semantic: Tensor) -> Tensor:
        fine = self.detail(detail) * upsample(self.semantic_up(semantic), 4, "nearest").sigmoid()
        coarse = self.detail_down(detail) * self.semantic(semantic).sigmoid()
        return self.last(fine + upsample(coarse, 4, "nearest"))  # type: ignore[no-any-return]


class Head(nn.Module):
    """3x3 convolution, dropout, 1x1 convolution and upsampling by ``factor``. Auxiliary heads have another 3x3 convolution."""

    def __init__(self, inputs: int, inner: int, num_classes: int, factor: int, auxiliary: bool = False) -> None:
        super().__init__()
        self.conv = conv_relu(inputs, inner, 3)
        self.auxiliary, self.factor = auxiliary, factor
        self.wider = conv_relu(inner, factor**2, 3) if auxiliary else nn.Sequential()
        self.logits = nn.Conv2d(factor**2 if auxiliary else inner, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = F.dropout(self.conv(x), DROPOUT, self.training)
        if self.auxiliary:
            return upsample(self.logits(self.wider(upsample(out, 2, "nearest"))), self.factor // 2)
        return upsample(self.logits(out), self.factor)


class BiSeNetV2(nn.Module):
    """Class logits for every pixel, and in training also the logits of four auxiliary heads. Image sides must be multiples of
    32."""

    # the stem of the semantic branch, the output layer, and the heads that only training uses
    smartprune_skip: ClassVar[tuple[str, ...]] = ("semantic.stem.first.0", "head.logits", "auxiliary.*")

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.detail = Detail(in_channels)
        self.semantic = Semantic(in_channels)
        self.aggregation = Aggregation(DETAIL[-1])
        self.head = Head(DETAIL[-1], HEAD, num_classes, 8)
        pairs = zip(SEMANTIC, (4, 8, 16, 32), strict=True)
        self.auxiliary = nn.ModuleList(Head(width, AUXILIARY, num_classes, factor, auxiliary=True) for width, factor in pairs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits [batch, classes, rows, columns]; in training a tuple that includes the auxiliary heads."""
        *features, context = self.semantic(x)
        out: Tensor = self.head(self.aggregation(self.detail(x), context))
        if not self.training:
            return out
        return (out, *(head(feature) for head, feature in zip(self.auxiliary, features, strict=True)))


def bisenetv2(num_classes: int = 19, in_channels: int = 3) -> nn.Module:
    """BiSeNetV2: detail branch 64-64-128, semantic branch 16-32-64-128, head of 1024 channels, four auxiliary heads.

    >>> sum(p.numel() for name, p in bisenetv2().named_parameters() if not name.startswith("auxiliary"))
    3358627
    """
    return BiSeNetV2(num_classes, in_channels)
