"""Kinds of layers: the one table of layer types with blocks, of the functions that compute them, and of masked modules."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYER_TYPES = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)  # their blocks lie in `weight`; nn.MultiheadAttention has other attributes
TRANSPOSED_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
LAYER_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d, *TRANSPOSED_FUNCTIONS)

LINK = "_smartprune_link"  # attribute of a masked module: (source of its weights, {attribute: index of the weight})
USER_CLASS = "_smartprune_class"  # attribute of the class of a masked module: the class that it replaces


def is_masked(module: nn.Module) -> bool:
    """Whether the module computes with weights that a pruner masks."""
    return LINK in module.__dict__


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was masked."""
    cls: type[nn.Module] = getattr(type(module), USER_CLASS, type(module))
    return cls
