"""What networks with empty channels are made of, and random empty channels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]  # a model and an example  # a model and an example


class Net(nn.Module):
    """A module with a forward method that is given as a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def image(channels: int = 3, side: int = 8) -> Tensor:
    return torch.randn(2, channels, side, side)


def empty_channels(model: nn.Module, seed: int, share: float = 0.4) -> nn.Module:
    """The model in eval mode, with random statistics, and with empty output and input channels in all of its weights."""
    draw = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.double)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                tensors = (module.running_mean, module.running_var, module.weight, module.bias)
                for tensor, start in zip(tensors, (-0.5, 0.5, 0.5, -0.5), strict=True):
                    if tensor is not None:
                        tensor.copy_(uniform(module.num_features) + start)
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and seed % 3 == 0:  # biases and scales
                weight.mul_(uniform(len(weight)) < 0.5)
            if weight.dim() > 1 and "place" not in name:
                for axis, part in ((0, share), (1, share / 2)):
                    if weight.shape[axis] > 1:
                        weight.index_fill_(axis, (uniform(weight.shape[axis]) < part).nonzero().flatten(), 0)
    return model.eval()
