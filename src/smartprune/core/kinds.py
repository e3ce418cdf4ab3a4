"""Kinds of layers: the one table of layer types with blocks, of the functions that compute them, and of masked modules."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYER_TYPES = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)  # their blocks lie in `weight`, as in a Conv1D (is_conv1d)
CELL_WEIGHTS = ("weight_ih", "weight_hh")  # of nn.LSTMCell, nn.GRUCell and nn.RNNCell
# the weights of nn.MultiheadAttention, and how many parts each has that no block crosses; the last three are those of kdim and vdim
ATTENTION_PARTS = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
TRANSPOSED_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
LAYER_FUNCTIONS = (F.linear, F.conv1d, F.conv2d, F.conv3d, *TRANSPOSED_FUNCTIONS)

LINK = "_smartprune_link"  # attribute of a masked module: (source of its weights, {attribute: index of the weight})
PRUNER = "_smartprune"  # attribute of a model that holds its pruner
USER_CLASS = "_smartprune_class"  # attribute of the class of a masked module: the class that it replaces


def is_masked(module: nn.Module) -> bool:
    """Whether the module computes with weights that a pruner masks."""
    return LINK in module.__dict__


def user_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was masked."""
    cls: type[nn.Module] = getattr(type(module), USER_CLASS, type(module))
    return cls


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is built like the ``Conv1D`` of transformers: a linear layer whose weight is (in, out), with ``nf`` outputs."""
    if not any(cls.__name__ == "Conv1D" for cls in type(module).__mro__) or isinstance(module, LAYER_TYPES):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]


def is_layer(module: nn.Module) -> bool:
    """Whether its attribute ``weight`` can be divided into blocks."""
    return isinstance(module, LAYER_TYPES) or is_conv1d(module)


def is_convolution(module: nn.Module) -> bool:
    """Whether it is a convolution, transposed or not."""
    return isinstance(module, (*CONVOLUTIONS, *TRANSPOSED))


def stores_inputs_first(module: nn.Module) -> bool:
    """Whether its weight is (in, out, ...), as in a transposed convolution or a Conv1D."""
    return isinstance(module, TRANSPOSED) or is_conv1d(module)


def weight_parts(module: nn.Module, attribute: str) -> int | None:
    """Segments of the first axis of a weight that no block crosses: groups, query, key and value, or the gates of a recurrent cell.
    None if the weight has no blocks."""
    if isinstance(module, nn.MultiheadAttention):
        return ATTENTION_PARTS.get(attribute)
    if isinstance(module, nn.RNNCellBase):
        weight = module._parameters.get(attribute) if attribute in CELL_WEIGHTS else None
        return None if weight is None else weight.shape[0] // module.hidden_size
    return int(getattr(module, "groups", 1)) if attribute == "weight" and is_layer(module) else None
