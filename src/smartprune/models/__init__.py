"""The networks of the experiments, by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .resnet import resnet8, resnet18

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": resnet18,
}
