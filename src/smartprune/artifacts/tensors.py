"""Named tensors: the stored tensors of a module, the tensors in a file, and which of them were learned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.occupancy import has_own_values
from ..errors import SmartpruneError

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def named_tensors(data: Mapping[str, object], where: str) -> dict[str, Tensor]:
    """The tensors among the values. A tensor that is larger than its storage raises."""
    out = {}
    for key, tensor in data.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            continue
        if tensor.layout is torch.strided and not tensor.is_meta and not _is_backed(tensor):
            raise SmartpruneError(f"{where}: {key} claims {tensor.numel():,} numbers and stores fewer; the file is damaged")
        out[key] = tensor
    if not out:
        raise SmartpruneError(f"{where}: holds no named tensors; give a state dict or a file that holds one")
    return out


def _is_backed(tensor: Tensor) -> bool:
    try:
        return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # tensor subclasses without a storage
        return True


def stored_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers as stored: the weight of a masked layer itself, not its product with the mask."""
    return stored_parameters(model) + [
        named for named in model.named_buffers(remove_duplicate=False) if isinstance(named[1], Tensor)
    ]


def stored_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters as stored, under every name that they have."""
    return [
        (f"{module_name}.{name}" if module_name else name, weight.detach())
        for module_name, module in model.named_modules()
        for name, weight in module._parameters.items()
        if weight is not None and not isinstance(weight, nn.UninitializedParameter)
    ]


def is_learned(name: str, tensor: Tensor) -> bool:
    """Whether a stored tensor holds learned values, judging by its name and its dtype."""
    if name.rpartition(".")[2] in STATISTICS or tensor.is_complex():
        return False
    return tensor.is_floating_point() or tensor.is_quantized or tensor.dtype in (torch.int8, torch.uint8)


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """A key that is the same for two names of one tensor."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0 or has_own_values(tensor):
        return (id(tensor),)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
