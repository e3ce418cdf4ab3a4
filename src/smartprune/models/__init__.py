"""Networks by name. A new network is one file and one line in this table."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .bisenetv2 import bisenetv2
from .densenet import densenet
from .googlenet import googlenet
from .mobilenetv2 import mobilenetv2
from .named import build, is_external
from .resnet import resnet8, resnet18
from .resnet50 import resnet50
from .yolov5m import yolov5m

__all__ = ["MODELS", "build", "is_external"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": resnet18,
    "densenet": densenet,
    "googlenet": googlenet,
    "mobilenetv2": mobilenetv2,
    "resnet50": resnet50,
    "yolov5m": yolov5m,
    "bisenetv2": bisenetv2,
}
