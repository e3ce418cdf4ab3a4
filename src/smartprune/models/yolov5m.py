"""YOLOv5m with ReLU: a CSP backbone, a path aggregation network over three scales, and a detection head on each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (8, 16, 32)  # pixels per cell of the three maps
ANCHORS = (  # width and height in pixels, three anchors per map
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
BOX = 5  # values before the classes: x, y, width, height, objectness
USUAL_SIZE, USUAL_OBJECTS = 640, 8  # image side and objects per image that initialize the objectness
Maps = tuple[Tensor, Tensor, Tensor]  # each [batch, anchors, rows, columns, BOX + classes]


class Conv(nn.Module):
    """Convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 1, stride: int = 1, padding: int | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2 if padding is None else padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    """1x1 and 3x3 convolutions with an optional shortcut."""

    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels)
        self.conv2 = Conv(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv2(self.conv1(x))
        return x + out if self.shortcut else out


class C3(nn.Module):
    """Half of the channels pass through bottlenecks, the other half bypass them. A 1x1 convolution joins both."""

    def __init__(self, inputs: int, outputs: int, depth: int, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.conv1 = Conv(inputs, half)
        self.conv2 = Conv(inputs, half)
        self.conv3 = Conv(2 * half, outputs)
        self.blocks = nn.Sequential(*(Bottleneck(half, shortcut) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(torch.cat([self.blocks(self.conv1(x)), self.conv2(x)], 1))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """Three 5x5 poolings in sequence (windows of 5, 9 and 13). A 1x1 convolution joins all of their outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels // 2)
        self.conv2 = Conv(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.conv1(x)]
        for _ in range(3):
            outputs.append(F.max_pool2d(outputs[-1], 5, 1, padding=2))
        return self.conv2(torch.cat(outputs, 1))  # type: ignore[no-any-return]


class Detect(nn.Module):
    """A 1x1 convolution per map: box, objectness and classes of three anchors in every cell."""

    anchors: Tensor  # [maps, anchors, 2] in pixels

    def __init__(self, inputs: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.outputs = BOX + num_classes
        self.register_buffer("anchors", torch.tensor(ANCHORS, dtype=torch.float32))
        self.convs = nn.ModuleList(nn.Conv2d(width, len(ANCHORS[0]) * self.outputs, 1) for width in inputs)
        for conv, stride in zip(self.convs, STRIDES, strict=True):
            bias = conv.bias.detach().view(-1, self.outputs)  # type: ignore[operator]
            bias[:, BOX - 1] += math.log(USUAL_OBJECTS * stride**2 / USUAL_SIZE**2)  # few cells contain an object
            bias[:, BOX:] += math.log(0.6 / (num_classes - 0.99999))  # few objects belong to one class

    def forward(self, *features: Tensor) -> Maps:
        maps = [conv(x).unflatten(1, (-1, self.outputs)) for conv, x in zip(self.convs, features, strict=True)]
        fine, middle, coarse = (out.permute(0, 1, 3, 4, 2) for out in maps)
        return fine, middle, coarse


class YOLOv5(nn.Module):
    """The v6 layout. Image sides must be multiples of 32. The model returns raw maps in training and in evaluation."""

    smartprune_skip: ClassVar[tuple[str, ...]] = ("detect.*",)  # output layers

    def __init__(self, widths: Sequence[int], depths: Sequence[int], num_classes: int, in_channels: int) -> None:
        super().__init__()
        c1, c2, c3, c4, c5 = widths
        d2, d3, d4, d5 = depths
        self.stem = Conv(in_channels, c1, 6, 2, padding=2)
        self.stage2 = nn.Sequential(Conv(c1, c2, 3, 2), C3(c2, c2, d2))
        self.stage3 = nn.Sequential(Conv(c2, c3, 3, 2), C3(c3, c3, d3))
        self.stage4 = nn.Sequential(Conv(c3, c4, 3, 2), C3(c4, c4, d4))
        self.stage5 = nn.Sequential(Conv(c4, c5, 3, 2), C3(c5, c5, d5), SPPF(c5))
        self.narrow5 = Conv(c5, c4)
        self.up4 = C3(2 * c4, c4, d5, shortcut=False)
        self.narrow4 = Conv(c4, c3)
        self.up3 = C3(2 * c3, c3, d5, shortcut=False)
        self.halve3 = Conv(c3, c3, 3, 2)
        self.down4 = C3(2 * c3, c4, d5, shortcut=False)
        self.halve4 = Conv(c4, c4, 3, 2)
        self.down5 = C3(2 * c4, c5, d5, shortcut=False)
        self.detect = Detect((c3, c4, c5), num_classes)

    def forward(self, x: Tensor) -> Maps:
        """The raw maps, each [batch, 3 anchors, rows, columns, 5 + classes], for strides 8, 16 and 32."""
        x3 = self.stage3(self.stage2(self.stem(x)))
        x4 = self.stage4(x3)
        p5 = self.narrow5(self.stage5(x4))
        p4 = self.narrow4(self.up4(torch.cat([F.interpolate(p5, scale_factor=2), x4], 1)))
        out3 = self.up3(torch.cat([F.interpolate(p4, scale_factor=2), x3], 1))
        out4 = self.down4(torch.cat([self.halve3(out3), p4], 1))
        out5 = self.down5(torch.cat([self.halve4(out4), p5], 1))
        return self.detect(out3, out4, out5)  # type: ignore[no-any-return]

    def decode(self, maps: Sequence[Tensor]) -> Tensor:
        """Boxes [batch, N, 5 + classes] from raw maps: center, width and height in pixels, objectness and classes in [0, 1].

        A center lies within one cell of the middle of its cell, and a side is at most four times that of its anchor:
        ``xy = (2 s - 0.5 + cell) * stride``, ``wh = (2 s)^2 * anchor`` with s the sigmoid of the raw value.
        """
        out = []
        for raw, anchors, stride in zip(maps, self.detect.anchors, STRIDES, strict=True):
            y, x = torch.meshgrid(*(torch.arange(n, device=raw.device) for n in raw.shape[2:4]), indexing="ij")
            s = raw.float().sigmoid()  # half precision cannot represent pixels
            xy = (2 * s[..., :2] - 0.5 + torch.stack([x, y], -1)) * stride
            wh = (2 * s[..., 2:4]).square() * anchors[:, None, None]
            out.append(torch.cat([xy, wh, s[..., 4:]], -1).flatten(1, 3))
        return torch.cat(out, 1)


def yolov5m(num_classes: int = 80, in_channels: int = 3) -> nn.Module:
    """YOLOv5m with ReLU: channels 48-96-192-384-768, CSP blocks with 2, 4, 6 and 2 bottlenecks, and 2 in the neck.

    >>> sum(p.numel() for p in yolov5m().parameters())
    21190557
    """
    return YOLOv5((48, 96, 192, 384, 768), (2, 4, 6, 2), num_classes, in_channels)
