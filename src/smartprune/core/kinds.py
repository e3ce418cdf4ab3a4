"""The kinds of layers that have blocks, and the functions that compute them: the one table that the package looks them up in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYER_TYPES = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)  # attention has blocks too, in weights of its own
TRANSPOSED_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
LAYER_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d, *TRANSPOSED_FUNCTIONS)

LINK = "_smartprune_link"  # the attribute of a masked module: (source of its weights, {attribute: index of the weight})
USER_CLASS = "_smartprune_class"  # the attribute of a masked module's class: the class it stands in for


def is_masked(module: nn.Module) -> bool:
    """Whether the module computes with masked weights of a pruner."""
    return LINK in module.__dict__


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was masked."""
    cls: type[nn.Module] = getattr(type(module), USER_CLASS, type(module))
    return cls
